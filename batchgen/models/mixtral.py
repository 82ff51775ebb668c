"""Mixtral: names of its own for the experts. In: config.json. Out: ModelConfig and checkpoint names."""

from typing import Any

from batchgen.models.config import ConfigReader, ModelConfig, read_decoder, refuse_short_window
from batchgen.models.names import Names

ARCHITECTURE = "MixtralForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mixtral config.json and generation_config.json."""
    reader = ConfigReader(values)
    refuse_short_window(values)
    return read_decoder(
        values,
        generation,
        architecture=ARCHITECTURE,
        num_experts=reader.get("num_local_experts"),
        moe_intermediate_size=reader.get("intermediate_size"),
        norm_topk_prob=True,
    )


NAMES = Names(moe="block_sparse_moe", gate="w1", up="w3", down="w2")
