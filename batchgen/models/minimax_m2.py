"""MiniMax-M2 and M2.5: norms whole projections, rotates parts of heads, corrected sigmoid routing. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import MoeNames, read_moe
from batchgen.models.grouped_query import read_grouped_query
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import read_rope, read_rotary_dim

ARCHITECTURE = "MiniMaxM2ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a MiniMax-M2 config.json and generation_config.json."""
    reader = ConfigReader(values)
    reader.refuse("use_qk_norm", (True,))
    reader.refuse("qk_norm_type", ("per_layer",))
    reader.refuse("scoring_func", ("sigmoid",))
    head_dim = reader.integer("head_dim")
    mixer = read_grouped_query(
        reader,
        rope=read_rope(reader, default_theta=5e6, partial=True),
        rotary_dim=read_rotary_dim(reader, head_dim),
        qk_norm="projection",
        qkv_bias=False,
        output_bias=False,
    )
    names = MoeNames(block="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias")
    moe = read_moe(reader, normalise=True, scoring="sigmoid", corrected=True, names=names)
    layer = LayerConfig(mixer=mixer, feed_forward=moe)
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=[layer] * reader.num_layers)
