"""Llama: dense. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ConfigReader, ModelConfig, read_decoder
from batchgen.models.names import Names

ARCHITECTURE = "LlamaForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Llama config.json and generation_config.json."""
    reader = ConfigReader(values)
    return read_decoder(values, generation, architecture=ARCHITECTURE, mlp_bias=reader.get("mlp_bias", default=False))


NAMES = Names()
