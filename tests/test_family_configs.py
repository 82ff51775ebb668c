"""What a config.json may not say, family by family: each contradiction is one error that names the field."""

import json
from collections.abc import Iterator
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from kimi_k3_reference import tiny_config
from tiny_models import FAMILIES, tiny_model

from batchgen.errors import ModelError
from batchgen.loader import Checkpoint
from batchgen.models.config import ModelConfig
from batchgen.models.registry import read_model_config

REFUSED = {
    "qwen3_moe": [
        ({"num_experts_per_tok": None}, "no num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "9 experts per token .num_experts_per_tok. out of 8 experts"),
        ({"num_attention_heads": 3}, "3 query heads .num_attention_heads. are not a multiple of 2 KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"vocab_size": "many"}, "vocab_size is a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is a positive integer"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type is 'su'"),
    ],
    "deepseek_v3": [
        ({"n_group": 3}, "8 experts cannot be routed within 2 .topk_group. of 3 groups .n_group."),
        ({"topk_group": 1}, "1 groups .topk_group. hold fewer than 3 experts per token"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"kv_lora_rank": -1}, "kv_lora_rank is a positive integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it takes an even number"),
    ],
    "deepseek_v32": [
        ({"q_lora_rank": None}, "q_lora_rank is null; the indexer takes its queries from that latent"),
        ({"index_head_dim": 4}, "index_head_dim is 4, smaller than qk_rope_head_dim, 8"),
        ({"index_topk": 0}, "index_topk is a positive integer"),
    ],
    "glm_moe_dsa": [
        ({"indexer_types": ["shared", "full", "full"]}, "begins with 'shared'"),
        ({"indexer_types": ["full"]}, "indexer_types holds full, shared for each of 3 layers"),
    ],
    "gpt_oss": [({"layer_types": ["linear"] * 4}, "layer_types holds")],
    "minimax_m2": [({"use_qk_norm": False}, "use_qk_norm is False")],
    "qwen3_next": [
        ({"linear_num_value_heads": 3}, "3 value heads .linear_num_value_heads. are not a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is a positive integer"),
        ({"layer_types": ["full_attention", "mamba", "mamba"]}, "layer_types holds linear_attention, full_attention"),
        ({"attention_bias": True}, "attention_bias is true"),
    ],
    "kimi_linear": [
        ({"linear_num_heads": None}, "no linear_num_heads"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"layer_types": None}, "no full_attn_layers"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [0, 1]}, "linear_head_dim": 12},
            "no num_heads",
        ),
        (
            {
                "layer_types": None,
                "linear_attn_config": {
                    "full_attn_layers": [2],
                    "kda_layers": [0, 1],
                    "head_dim": 12,
                    "num_heads": 4,
                    "short_conv_kernel_size": 4,
                },
            },
            r"name layers 1..3 once each, got \[0, 1, 2\]",
        ),
    ],
    "glm5_next": [
        ({"indexer_types": ["full", "shared", "full", "full", "full"]}, "layer 1 shares a choice of keys"),
        ({"index_kpool": 3}, "index_topk is 20, not a multiple of index_kpool, 3"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is False"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8"),
        ({"hc_mult": 0}, "hc_mult is a positive integer"),
        ({"swiglu_limit": None}, "no swiglu_limit"),
    ],
    "kimi_k25": [({"n_group": 5}, "8 experts cannot be routed")],
}
CASES = [(family, changes, message) for family, cases in REFUSED.items() for changes, message in cases]


@cache
def config_of(family: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return json.loads((tiny_model(family, folder) / "config.json").read_text())


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    return read_model_config(Checkpoint(folder))


NONSENSE = ["x", [], ["x"], [[1]], 0, -1, 10**12, 1.5, 1e-9, 1e300, True, False, float("nan"), float("inf")]
PLAUSIBLE = [1, {}, {"a": 1}]
"""What another field may contradict."""


def paths(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (name,)
        if isinstance(value, dict) and name != "vision_config":
            yield from ((name, *inner) for inner in paths(value))


@pytest.mark.parametrize(("family", "changes", "message"), CASES, ids=[f"{family}-{', '.join(changes)}" for family, changes, _ in CASES])
def test_a_contradiction_is_one_error_that_names_the_field(tmp_path: Path, family, changes, message):
    values = json.loads(json.dumps(config_of(family)))
    values.get("text_config", values).update(changes)
    with pytest.raises(ModelError, match=message):
        read(tmp_path, values)


@pytest.mark.parametrize("family", [*FAMILIES, "kimi_k3"])
def test_a_field_of_any_kind_and_size_is_read_or_one_error_that_names_it(tmp_path: Path, family):
    values = tiny_config() if family == "kimi_k3" else config_of(family)
    for path in paths(values):
        for value in NONSENSE + PLAUSIBLE:
            changed = json.loads(json.dumps(values))
            inner = reduce(getitem, path[:-1], changed)
            inner[path[-1]] = value
            try:
                read(tmp_path, changed)
            except ModelError as error:
                assert value in PLAUSIBLE or path[-1] in str(error), (path, value, error)


def test_glm_5_3_flash_may_be_flat_as_text_only_checkpoints_are(tmp_path: Path):
    values = config_of("glm5_next")
    flat = {name: value for name, value in values.items() if name not in ("text_config", "vision_config")} | values["text_config"]
    assert read(tmp_path, flat | {"architectures": values["architectures"]}) == read(tmp_path, values)


@pytest.mark.parametrize("value", [1, 40])
def test_whole_numbers_are_fractions_too(tmp_path: Path, value):
    config = read(tmp_path, config_of("olmoe") | {"clip_qkv": value, "rms_norm_eps": value})
    assert type(config.rms_norm_eps) is type(config.layers[0].mixer.clip_qkv) is float


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn"},
        {"rope_type": "yarn", "factor": 0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5},
        {"rope_type": "default", "rope_theta": 1},
        {"rope_type": "default", "rope_theta": float("nan")},
        "yarn",
    ],
    ids=str,
)
def test_rotations_that_would_give_no_angle_are_refused(tmp_path: Path, rope):
    with pytest.raises(ModelError, match=r"config.json.*(factor|original_max_position_embeddings|rope_theta|rope_parameters)"):
        read(tmp_path, config_of("llama") | {"rope_parameters": rope})
