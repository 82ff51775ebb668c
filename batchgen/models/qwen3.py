"""Qwen3: dense, norms each query and key head. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ModelConfig, read_decoder
from batchgen.models.names import Names

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3 config.json and generation_config.json."""
    return read_decoder(values, generation, architecture=ARCHITECTURE, qk_norm="head")


NAMES = Names()
