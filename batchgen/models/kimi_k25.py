"""Kimi-K2.5, its language model: DeepSeek-V3 beside a vision tower that is left aside. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import ModelConfig
from batchgen.models.deepseek_v3 import read_deepseek
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "KimiK25ForConditionalGeneration"
RENAMED = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
"""What transformers 5 calls these tensors: in files that it saves, where its vision tower's renaming takes the layers along, and loaded."""


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Kimi-K2.5 config.json and generation_config.json."""
    reader = ConfigReader(values).nested("text_config")
    mixer = read_latent(reader, interleaved=reader.flag("rope_interleave", default=True))
    return read_deepseek(
        reader,
        generation,
        [mixer] * reader.num_layers,
        architecture=ARCHITECTURE,
        prefix="language_model.model",
        head="language_model.lm_head",
        ignored=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    )
