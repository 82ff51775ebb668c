"""GLM-5.3-Flash, its language model: KDA, sparse attention by pools of keys, hyper-connections. In: config.json. Out: ModelConfig."""

from dataclasses import replace
from typing import Any

from batchgen.errors import ModelError
from batchgen.models.config import LayerConfig, MixerSpec, ModelConfig, read_decoder
from batchgen.models.deepseek_v3 import read_experts
from batchgen.models.delta import KimiDelta
from batchgen.models.feed_forward import dense_first
from batchgen.models.glm_moe_dsa import read_indexer_types
from batchgen.models.hyper_connections import HyperConnections
from batchgen.models.indexer import read_indexer
from batchgen.models.kimi_linear import linear_config, read_sizes
from batchgen.models.latent import read_latent
from batchgen.models.reader import MAX_NUMBER, ConfigReader
from batchgen.moe.activation import Activation

ARCHITECTURE = "Glm5NextForConditionalGeneration"
LAYER_TYPES = ("linear_attention", "indexed_attention", "full_attention")


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a GLM-5.3-Flash config.json, with a `text_config` or, without a vision tower, flat, and generation_config.json."""
    reader = ConfigReader(values)
    reader = reader.nested("text_config") if reader.has("text_config") else reader
    reader.refuse("index_kpool_always_select_tail", (True,))
    reader.refuse("qk_rope_head_dim", (0,))
    limited = Activation("limited", b=reader.number("swiglu_limit"))
    moe = replace(read_experts(reader), activation=limited)
    prefix = "model.language_model"
    num_layers = reader.num_layers
    return read_decoder(
        reader,
        generation,
        architecture=ARCHITECTURE,
        layers=[
            LayerConfig(mixer=mixer, feed_forward=each)
            for mixer, each in zip(_read_mixers(reader), dense_first(reader, moe, activation=limited), strict=True)
        ],
        residuals=HyperConnections(
            num_streams=reader.count("hc_mult"), num_iterations=reader.count("hc_sinkhorn_iters"), eps=reader.number("hc_eps")
        ),
        prefix=prefix,
        ignored=("model.visual.", f"{prefix}.layers.{num_layers}."),
    )


def _read_mixers(reader: ConfigReader) -> list[MixerSpec]:
    own = linear_config(reader)
    linear = KimiDelta(
        sizes=read_sizes(reader),
        bound=own.number("gate_lower_bound", "linear_lower_bound", default=-5.0, above=-MAX_NUMBER, below=0.0),
        flat_rates=True,
    )
    indexer = read_indexer(reader, rope=None, interleaved=False, pool=reader.count("index_kpool"))
    full = read_latent(reader, rope=None, norm_eps=reader.number("rms_norm_eps"), indexer=indexer)
    shared = replace(full, indexer=None, shares_choice=True)
    types = reader.per_layer("layer_types", LAYER_TYPES)
    if types is None:
        types = ["linear_attention" if i % 4 != 3 else "indexed_attention" for i in range(reader.num_layers)]
    mixers: list[MixerSpec] = []
    chosen = False
    for kind, choice in zip(types, read_indexer_types(reader), strict=True):
        if kind == "linear_attention":
            mixers.append(linear)
            continue
        if choice == "shared" and not chosen:
            raise ModelError(f"config.json: layer {len(mixers)} shares a choice of keys (indexer_types), but no earlier layer makes one")
        chosen = True
        mixers.append(full if choice == "full" else shared)
    return mixers
