"""OLMoE: norms the whole query and key projections. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import read_moe
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "OlmoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a OLMoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    attention = read_grouped_query(reader, qk_norm="projection", clip_qkv=reader.number("clip_qkv") if reader.has("clip_qkv") else None)
    layer = LayerConfig(mixer=attention, feed_forward=read_moe(reader))
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=[layer] * reader.num_layers)
