"""Qwen2-MoE: biases on q, k and v, and an expert that all tokens share. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ConfigReader, ModelConfig, read_decoder
from batchgen.models.names import Names

ARCHITECTURE = "Qwen2MoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2-MoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    return read_decoder(
        values,
        generation,
        architecture=ARCHITECTURE,
        qkv_bias=reader.get("qkv_bias", default=True),
        output_bias=False,
        num_experts=reader.get("num_experts"),
        moe_intermediate_size=reader.get("moe_intermediate_size"),
        shared_expert_intermediate_size=reader.get("shared_expert_intermediate_size"),
    )


NAMES = Names()
