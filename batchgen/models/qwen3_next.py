"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, a shared expert. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.delta import DeltaSizes, GatedDeltaNet
from batchgen.models.feed_forward import MoeNames, read_moe, sparse_layers
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import read_rope, read_rotary_dim

ARCHITECTURE = "Qwen3NextForCausalLM"
LAYER_TYPES = ("linear_attention", "full_attention")


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-Next config.json and generation_config.json."""
    reader = ConfigReader({"partial_rotary_factor": 0.25} | values)
    full = read_grouped_query(
        reader,
        rope=read_rope(reader, default_theta=10000.0, partial=True),
        rotary_dim=read_rotary_dim(reader, reader.integer("head_dim")),
        qk_norm="head",
        norm_offset=1.0,
        gated=True,
    )
    if full.qkv_bias:
        raise ModelError("config.json: attention_bias is true; supported: false")
    linear = GatedDeltaNet(
        sizes=DeltaSizes(
            num_key_heads=reader.count("linear_num_key_heads"),
            num_value_heads=reader.count("linear_num_value_heads"),
            key_dim=reader.integer("linear_key_head_dim"),
            value_dim=reader.integer("linear_value_head_dim"),
            num_taps=reader.count("linear_conv_kernel_dim"),
        )
    )
    moe = read_moe(
        reader,
        normalise=reader.flag("norm_topk_prob", default=True),
        shared_width=reader.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        names=MoeNames(shared="shared_expert"),
    )
    types = reader.per_layer("layer_types", LAYER_TYPES)
    if types is None:
        every = reader.count("full_attention_interval", default=4)
        types = [LAYER_TYPES[(i + 1) % every == 0] for i in range(reader.num_layers)]
    layers = [
        LayerConfig(mixer=full if kind == "full_attention" else linear, feed_forward=each)
        for kind, each in zip(types, sparse_layers(reader, moe), strict=True)
    ]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers, norm_offset=1.0, ignored=("mtp.",))
