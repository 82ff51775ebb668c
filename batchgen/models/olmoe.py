"""OLMoE: norms the whole query and key projections. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ConfigReader, ModelConfig, read_decoder
from batchgen.models.names import Names

ARCHITECTURE = "OlmoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a OLMoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    return read_decoder(
        values,
        generation,
        architecture=ARCHITECTURE,
        qk_norm="projection",
        clip_qkv=values.get("clip_qkv"),
        num_experts=reader.get("num_experts"),
        moe_intermediate_size=reader.get("intermediate_size"),
    )


NAMES = Names()
