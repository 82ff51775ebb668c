"""Kimi-Linear: KDA layers, latent attention without rotation between them, DeepSeek-V3's experts. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import LayerConfig, MixerSpec, ModelConfig, read_decoder
from batchgen.models.delta import DeltaSizes, KimiDelta
from batchgen.models.feed_forward import Moe, MoeNames, dense_first, read_moe
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "KimiLinearForCausalLM"
NAMES = MoeNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
LAYER_TYPES = ("linear_attention", "full_attention")


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Kimi-Linear config.json and generation_config.json."""
    reader = ConfigReader(values)
    mixers = read_mixers(reader, full=read_latent(reader, rope=None), linear=KimiDelta(sizes=read_sizes(reader)))
    feed_forwards = dense_first(reader, read_experts(reader), saved_as="block_sparse_moe")
    layers = [LayerConfig(mixer=mixer, feed_forward=each) for mixer, each in zip(mixers, feed_forwards, strict=True)]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers)


def linear_config(reader: ConfigReader) -> ConfigReader:
    """`linear_attn_config`; transformers writes its fields side by side with the others."""
    return reader.nested("linear_attn_config") if reader.has("linear_attn_config") else reader


def read_sizes(reader: ConfigReader) -> DeltaSizes:
    """Sizes of the KDA layers."""
    own = linear_config(reader)
    head_dim, num_heads, num_taps = (
        ("head_dim", "num_heads", "short_conv_kernel_size")
        if reader.has("linear_attn_config")
        else ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    )
    size, heads = own.integer(head_dim), own.count(num_heads)
    return DeltaSizes(num_key_heads=heads, num_value_heads=heads, key_dim=size, value_dim=size, num_taps=own.count(num_taps))


def read_mixers(reader: ConfigReader, full: MixerSpec, linear: MixerSpec) -> list[MixerSpec]:
    """Each layer's mixer: `layer_types`, or lists of layer numbers that begin at 1."""
    types = reader.per_layer("layer_types", LAYER_TYPES)
    if types is not None:
        return [full if kind == "full_attention" else linear for kind in types]
    own = linear_config(reader)
    numbers = dict.fromkeys(own.integers("full_attn_layers"), full) | dict.fromkeys(own.integers("kda_layers"), linear)
    if set(numbers) != set(range(1, reader.num_layers + 1)):
        raise ModelError(
            f"config.json: full_attn_layers and kda_layers of linear_attn_config name layers 1..{reader.num_layers} once each, "
            f"got {sorted(numbers)!r:.200}"
        )
    return [numbers[number] for number in range(1, reader.num_layers + 1)]


def read_experts(reader: ConfigReader, **family: Any) -> Moe:
    """Experts chosen by corrected sigmoids, within groups."""
    reader.refuse("moe_router_activation_func", ("sigmoid",))
    return read_moe(
        reader,
        num_experts=reader.count("num_experts", "num_local_experts"),
        normalise=reader.flag("moe_renormalize", "norm_topk_prob", default=True),
        scoring="sigmoid",
        num_groups=reader.count("num_expert_group", "n_group", default=1),
        num_kept_groups=reader.count("topk_group", default=1),
        group_top=2,
        scale=reader.number("routed_scaling_factor", default=1.0),
        corrected=True,
        wide_router=True,
        shared_width=reader.integer("moe_intermediate_size") * reader.count("num_shared_experts", "n_shared_experts", default=0, least=0),
        names=NAMES,
        **family,
    )
