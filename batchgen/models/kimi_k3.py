"""Kimi-K3, its language model: Kimi-Linear with attention residuals, SiTU and experts in a latent. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.attention_residuals import AttentionResiduals
from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.delta import KimiDelta
from batchgen.models.feed_forward import dense_first
from batchgen.models.kimi_linear import linear_config, read_experts, read_mixers, read_sizes
from batchgen.models.latent import read_latent
from batchgen.models.reader import MAX_NUMBER, ConfigReader
from batchgen.moe.activation import Activation

ARCHITECTURE = "KimiK3ForConditionalGeneration"
NUM_STORED_RATES = 128
"""`A_log` is stored with that many entries, of which each head has one."""


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Kimi-K3 config.json and generation_config.json."""
    reader = ConfigReader(values).nested("text_config")
    reader.refuse("mla_use_nope", (True,))
    own, sizes = linear_config(reader), read_sizes(reader)
    linear = KimiDelta(
        sizes=sizes,
        bound=own.number("gate_lower_bound", above=-MAX_NUMBER, below=0.0) if own.has("gate_lower_bound") else None,
        wide_gate=own.flag("use_full_rank_gate"),
        num_rates=max(NUM_STORED_RATES, sizes.num_value_heads),
        flat_rates=True,
    )
    full = read_latent(reader, rope=None, gated=reader.flag("mla_use_output_gate"))
    situ = Activation("situ", reader.number("activation_situ_beta"), reader.number("activation_situ_linear_beta"))
    latent_size = reader.integer("routed_expert_hidden_size", default=0, least=0)
    latent_norm = latent_size > 0 and reader.flag("latent_moe_use_norm")
    moe = read_experts(reader, activation=situ, latent_size=latent_size, latent_norm=latent_norm)
    feed_forwards = dense_first(reader, moe, activation=situ)
    mixers = read_mixers(reader, full=full, linear=linear)
    return read_decoder(
        reader,
        generation,
        architecture=ARCHITECTURE,
        layers=[LayerConfig(mixer=mixer, feed_forward=each) for mixer, each in zip(mixers, feed_forwards, strict=True)],
        hidden_act="situ",
        residuals=AttentionResiduals(block_size=reader.integer("attn_res_block_size")) if reader.has("attn_res_block_size") else None,
        prefix="language_model.model",
        head="language_model.lm_head",
        ignored=("vision_tower.", "mm_projector."),
    )
