"""config.json of released models, as far as it differs from transformers' defaults and a sequence's size depends on it."""

from typing import Any

import transformers
from kimi_k3_reference import tiny_config

from batchgen.models.config import ModelConfig
from batchgen.models.registry import FAMILIES

_FULL_ATTENTION = [4, 8, 12, 16, 20, 24, 27]
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("Qwen3Moe", {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048}),
    "OLMoE-1B-7B": ("Olmoe", {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048}),
    "Mixtral-8x7B": ("Mixtral", {"num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": None}),
    "DeepSeek-V2-Lite": (
        "DeepseekV2",
        {"num_hidden_layers": 27, "q_lora_rank": None, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    ),
    "DeepSeek-V3": ("DeepseekV3", {"num_hidden_layers": 61}),
    "DeepSeek-V3.2": ("DeepseekV32", {"num_hidden_layers": 61}),
    "GLM-5": ("GlmMoeDsa", {"num_hidden_layers": 78}),
    "MiniMax-M2": ("MiniMaxM2", {"num_hidden_layers": 62, "num_key_value_heads": 8, "head_dim": 128}),
    "gpt-oss-20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("GptOss", {"num_hidden_layers": 36, "num_local_experts": 128}),
    "Qwen3-Next-80B-A3B": ("Qwen3Next", {"num_hidden_layers": 48}),
    "Kimi-Linear-48B-A3B": (
        "KimiLinear",
        {"layer_types": ["full_attention" if i + 1 in _FULL_ATTENTION else "linear_attention" for i in range(27)]},
    ),
}


def released_models() -> dict[str, ModelConfig]:
    """The models' configurations, read as their checkpoints'."""
    models = {}
    for name, (prefix, changes) in RELEASED.items():
        values = getattr(transformers, f"{prefix}Config")(**changes).to_dict()
        models[name] = FAMILIES[f"{prefix}ForCausalLM"].read_config(values, {})
    values = {"text_config": transformers.Glm5NextTextConfig().to_dict()}
    models["GLM-5.3-Flash"] = FAMILIES["Glm5NextForConditionalGeneration"].read_config(values, {})
    layers = range(1, 94)
    k3 = tiny_config(
        num_hidden_layers=93,
        kda_layers=[i for i in layers if i % 4 and i != 93],
        full_attn_layers=[i for i in layers if i % 4 == 0 or i == 93],
        head_dim=128,
        num_heads=96,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    models["Kimi-K3"] = FAMILIES["KimiK3ForConditionalGeneration"].read_config(k3, {})
    return models
