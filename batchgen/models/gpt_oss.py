"""GPT-OSS: attention sinks, windows in every other layer, clamped experts with biases. In: config.json. Out: ModelConfig."""

from dataclasses import replace
from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import MoeNames, read_moe
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import MAX_TABLE, ConfigReader
from batchgen.models.rotary import read_rope
from batchgen.moe.activation import Activation

ARCHITECTURE = "GptOssForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GPT-OSS config.json and generation_config.json."""
    reader = ConfigReader(values)
    full = read_grouped_query(reader, rope=read_rope(reader, default_theta=150000.0), sinks=True)
    windowed = replace(full, window=reader.integer("sliding_window", default=0, least=0, most=MAX_TABLE))
    moe = read_moe(
        reader,
        moe_intermediate_size=reader.integer("intermediate_size"),
        scoring="chosen",
        activation=Activation("clamped", reader.number("swiglu_alpha", default=1.702), reader.number("swiglu_limit", default=7.0)),
        biased=True,
        names=MoeNames(router="router"),
    )
    kinds = reader.per_layer("layer_types", ("sliding_attention", "full_attention"))
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(reader.num_layers)]
    layers = [LayerConfig(mixer=full if kind == "full_attention" else windowed, feed_forward=moe) for kind in kinds]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers)
