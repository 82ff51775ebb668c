"""Qwen3-MoE: norms each query and key head. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ConfigReader, ModelConfig, read_decoder
from batchgen.models.names import Names

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    return read_decoder(
        values,
        generation,
        architecture=ARCHITECTURE,
        qk_norm="head",
        num_experts=reader.get("num_experts", "num_local_experts", default=0),
        moe_intermediate_size=reader.get("moe_intermediate_size", default=0),
    )


NAMES = Names()
