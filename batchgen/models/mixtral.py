"""Mixtral: names of its own for the experts. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import MoeNames, read_moe
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "MixtralForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Mixtral config.json and generation_config.json."""
    reader = ConfigReader(values)
    reader.refuse_short_window()
    moe = read_moe(reader, normalise=True, names=MoeNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"))
    layer = LayerConfig(mixer=read_grouped_query(reader), feed_forward=moe)
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=[layer] * reader.num_layers)
