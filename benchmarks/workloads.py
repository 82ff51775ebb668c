"""The work that engines are timed on. In: a name. Out: prompts (token ids), output lengths, a model folder. Torch only to write a model.

Definitions follow the project's shared benchmark notes (`bench/workloads.py` there), so that figures can be compared: random weights,
EOS ignored, lengths forced, temperature 1, the logprob of every sampled token returned. The work is then the same for every engine.
"""

import json
import random
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

SHAPES = {
    "cpu": (64, 64, 128),
    "short": (32, 64, 64),
    "service": (1024, 64, 32),
    "uniform": (1024, 256, 512),
    "prefill": (128, 2048, 1),
}
"""Workload → sequences, prompt tokens, output tokens; `longtail` and `group` are made in `workload`."""
NAMES = (*SHAPES, "longtail", "group")


def workload(name: str, vocab_size: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts and the exact number of tokens to generate for each; ids keep clear of both ends of the vocabulary."""
    rng = random.Random(seed)
    margin = min(1000, vocab_size // 8)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(margin, vocab_size - margin) for _ in range(length)]

    if name == "longtail":
        return [prompt(256) for _ in range(1024)], [min(3500, max(16, int(rng.lognormvariate(5.3, 0.9)))) for _ in range(1024)]
    if name == "group":
        return [each for each in [prompt(512) for _ in range(64)] for _ in range(16)], [256] * 1024
    if name not in SHAPES:
        raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    num_sequences, num_prompt, num_output = SHAPES[name]
    return [prompt(num_prompt) for _ in range(num_sequences)], [num_output] * num_sequences


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
