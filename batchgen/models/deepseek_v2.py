"""DeepSeek-V2: latent attention, softmax routing within groups of experts, a shared expert. In: config.json. Out: ModelConfig."""

from typing import Any

from batchgen.models.config import LayerConfig, ModelConfig, read_decoder
from batchgen.models.feed_forward import dense_first, read_moe
from batchgen.models.latent import read_latent
from batchgen.models.reader import ConfigReader

ARCHITECTURE = "DeepseekV2ForCausalLM"


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a DeepSeek-V2 config.json and generation_config.json."""
    reader = ConfigReader(values)
    reader.refuse("topk_method", ("greedy", "group_limited_greedy"))
    reader.refuse("scoring_func", ("softmax",))
    reader.refuse("norm_topk_prob", (False,))
    grouped = reader.get("topk_method", default="greedy") == "group_limited_greedy"
    moe = read_moe(
        reader,
        normalise=False,
        num_groups=reader.count("n_group") if grouped else 1,
        num_kept_groups=reader.count("topk_group") if grouped else 1,
        scale=reader.number("routed_scaling_factor", default=1.0),
        wide_router=True,
        shared_width=reader.integer("moe_intermediate_size") * reader.count("n_shared_experts", default=0, least=0),
    )
    mixer = read_latent(reader)
    layers = [LayerConfig(mixer=mixer, feed_forward=each) for each in dense_first(reader, moe)]
    return read_decoder(reader, generation, architecture=ARCHITECTURE, layers=layers)
