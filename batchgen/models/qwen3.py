"""Qwen3: dense, norms each query and key head. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import Dense
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3 config.json and generation_config.json."""
    reader = ConfigReader(values)
    feed_forward = Dense(intermediate_size=reader.integer("intermediate_size"))
    layer = LayerConfig(mixer=read_grouped_query(reader, qk_norm="head"), feed_forward=feed_forward)
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=[layer] * reader.num_layers)
