"""Qwen2-MoE: biases on q, k and v, and an expert that all tokens share. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import MoeNames, read_moe, sparse_layers
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "Qwen2MoeForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen2-MoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    attention = read_grouped_query(reader, qkv_bias=reader.flag("qkv_bias", default=True), output_bias=False)
    moe = read_moe(
        reader,
        shared_width=reader.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=MoeNames(shared="shared_expert"),
    )
    layers = [LayerConfig(mixer=attention, feed_forward=each) for each in sparse_layers(reader, moe)]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers)
