"""DeepSeek-V3, R1, V3.1 and Kimi-K2: latent attention, corrected sigmoid routing, a shared expert. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, MixerSpec, ModelConfig, read_decoder
from batchgen.models.feed_forward import Moe, dense_first, read_moe
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "DeepseekV3ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek-V3 config.json and generation_config.json."""
    reader = ConfigReader(values)
    mixer = read_latent(reader, interleaved=reader.flag("rope_interleave", default=True))
    return read_deepseek(reader, generation, [mixer] * reader.num_layers, architecture=ARCHITECTURE)


def read_deepseek(reader: ConfigReader, generation: dict[str, Any], mixers: list[MixerSpec], **family: Any) -> ModelConfig:
    """ModelConfig with these mixers, DeepSeek-V3's experts, and its layers for multi-token prediction left aside."""
    prefix = family.get("prefix", "model")
    num_extra = reader.count("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    extra = tuple(f"{prefix}.layers.{reader.num_layers + i}." for i in range(num_extra))
    layers = [
        LayerConfig(mixer=mixer, feed_forward=each) for mixer, each in zip(mixers, dense_first(reader, read_experts(reader)), strict=True)
    ]
    family["ignored"] = (*extra, *family.get("ignored", ()))
    return read_decoder(reader, generation, layers=layers, **family)


def read_experts(reader: ConfigReader) -> Moe:
    """Experts chosen by corrected sigmoids, within the groups with the highest sum of two."""
    reader.refuse("topk_method", ("noaux_tc",))
    reader.refuse("scoring_func", ("sigmoid",))
    return read_moe(
        reader,
        normalise=reader.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        num_groups=reader.count("n_group", default=1),
        num_kept_groups=reader.count("topk_group", default=1),
        group_top=2,
        scale=reader.number("routed_scaling_factor", default=1.0),
        corrected=True,
        wide_router=True,
        shared_width=reader.integer("moe_intermediate_size") * reader.count("n_shared_experts", default=0, least=0),
    )
