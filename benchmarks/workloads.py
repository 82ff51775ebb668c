"""Models of real size with random weights, for `rollout.bench.workloads`. In: a name. Out: a model folder. Torch only to write one."""

import json
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    },
    "cpu-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "intermediate_size": 1024,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
"""Architecture keys as in Hugging Face config.json."""


def write_model(name: str, dtype: str, folder: Path) -> Path:
    """A folder with the model in `dtype` (`float32`, `bfloat16`), random weights, written by transformers; kept if it is already there."""
    config_values = MODELS[name] | {"torch_dtype": dtype}
    stamp = folder / "benchmark.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == config_values:
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config_values.items() if key not in ("model_type", "torch_dtype")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config_values["model_type"], **values), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    stamp.write_text(json.dumps(config_values))
    return folder
