"""What a config.json may not say, family by family: each contradiction is one error that names the field."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tiny_models import tiny_model

from batchgen.errors import ModelError
from batchgen.loader import Checkpoint
from batchgen.models.registry import read_model_config

REFUSED = {
    "qwen3_moe": [
        ({"num_experts_per_tok": None}, "no num_experts_per_tok"),
        ({"num_experts_per_tok": 9}, "9 experts per token out of 8 experts"),
        ({"num_attention_heads": 3}, "3 query heads are not a multiple of 2 KV heads"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"vocab_size": "many"}, "vocab_size is a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is a positive integer"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type is 'su'"),
    ],
    "deepseek_v3": [
        ({"n_group": 3}, "8 experts cannot be routed within 2 of 3 groups"),
        ({"topk_group": 1}, "1 groups hold fewer than 3 experts per token"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"kv_lora_rank": -1}, "kv_rank is a positive integer"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; it takes an even number"),
    ],
    "deepseek_v32": [
        ({"q_lora_rank": None}, "q_lora_rank is null; the indexer takes its queries from that latent"),
        ({"index_head_dim": 4}, "index_head_dim is 4, smaller than qk_rope_head_dim, 8"),
        ({"index_topk": 0}, "top_k is a positive integer"),
    ],
    "glm_moe_dsa": [
        ({"indexer_types": ["shared", "full", "full"]}, "begins with 'shared'"),
        ({"indexer_types": ["full"]}, "indexer_types holds full, shared for each of 3 layers"),
    ],
    "gpt_oss": [({"layer_types": ["linear"] * 4}, "layer_types holds")],
    "minimax_m2": [({"use_qk_norm": False}, "use_qk_norm is False")],
    "qwen3_next": [
        ({"linear_num_value_heads": 3}, "3 value heads are not a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 0}, "num_taps is a positive integer"),
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
        ({"hc_mult": 0}, "num_streams is a positive integer"),
        ({"swiglu_limit": None}, "no swiglu_limit"),
    ],
    "kimi_k25": [({"n_group": 5}, "8 experts cannot be routed")],
}
CASES = [(family, changes, message) for family, cases in REFUSED.items() for changes, message in cases]


@cache
def config_of(family: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return json.loads((tiny_model(family, folder) / "config.json").read_text())


@pytest.mark.parametrize(("family", "changes", "message"), CASES, ids=[f"{family}-{', '.join(changes)}" for family, changes, _ in CASES])
def test_a_contradiction_is_one_error_that_names_the_field(tmp_path: Path, family, changes, message):
    values = json.loads(json.dumps(config_of(family)))
    values.get("text_config", values).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ModelError, match=message):
        read_model_config(Checkpoint(tmp_path))
