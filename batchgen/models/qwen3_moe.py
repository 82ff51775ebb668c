"""Qwen3-MoE: norms each query and key head. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import FeedForwardSpec, LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import Dense, read_moe, sparse_layers
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    attention = read_grouped_query(reader, qk_norm="head")
    feed_forwards: list[FeedForwardSpec]
    if reader.count("num_experts", "num_local_experts", default=0, least=0):
        feed_forwards = sparse_layers(reader, read_moe(reader))
    else:
        feed_forwards = [Dense(intermediate_size=reader.integer("intermediate_size"))] * reader.num_layers
    layers = [LayerConfig(mixer=attention, feed_forward=each) for each in feed_forwards]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers)
