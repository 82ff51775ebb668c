"""Tiny random checkpoints and byte-level tokenizers for tests, and a plain way to run a model without an engine."""

import json
from pathlib import Path
from typing import Any

import torch

from batchgen.kv_cache import CacheLayout, KVCache, PageShape
from batchgen.models.registry import LoadedModel
from batchgen.packing import PackedBatch

PAGE_SIZE = 4


def tiny_moe(path: str | Path, seed: int = 0, tokenizer: bool = False, **overrides: Any) -> Path:
    """Save a random checkpoint of about 60,000 parameters with transformers and return its folder. Ids 0..255 are bytes, 256 is EOS."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 256,
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**(values | overrides))
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(getattr(torch, str(config.dtype).removeprefix("torch."))).save_pretrained(path)
    if tokenizer:
        save_byte_tokenizer(path)
    return Path(path)


def save_byte_tokenizer(path: str | Path) -> None:
    """tokenizer.json where id = byte value for 0..255 and <eos> = 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in characters)}
    tokenizer = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer.save(str(Path(path) / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (Path(path) / "tokenizer_config.json").write_text(json.dumps(settings))


_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 20}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "head_dim": 16}),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 32, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {}),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 11,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, **_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, **_DEEPSEEK}),
    "kimi_k25": ("Kimi_K25", {**_LATENT, **_DEEPSEEK}),
    "deepseek_v32": ("DeepseekV32", {**_LATENT, **_DEEPSEEK, **_INDEXER}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 20,
            "initializer_range": 0.1,  # at 0.2 transformers' own float32 is 1e-4 from its float64
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{name: value for name, value in _LATENT.items() if name != "q_lora_rank"},
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "pad_token_id": 0,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "glm5_next": (
        "Glm5Next",
        {
            **_LATENT,
            **_INDEXER,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 5,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "swiglu_limit": 1.0,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full", "shared", "full", "full"],
            "mlp_layer_types": ["dense", *["sparse"] * 4],
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsa", {**_LATENT, **_DEEPSEEK, **_INDEXER, "indexer_types": ["full", "shared", "full"]}),
}
"""transformers' class prefix, and what a small model of the family needs beside the common sizes."""


def tiny_model(family: str, path: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a small random checkpoint of a family with transformers and return its folder; norms and biases are random too."""
    import transformers

    prefix, own = FAMILIES[family]
    values: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 256,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    values |= own | overrides
    make_config = getattr(transformers, f"{prefix}Config")
    if family in VISION_TOWERS:
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(make_config(**_beside_a_vision_tower(family, values)))
    else:
        model = getattr(transformers, f"{prefix}ForCausalLM")(make_config(**values))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += torch.empty_like(parameter).uniform_(-0.5, 0.5)  # around one, or around zero where one is added
        elif name.endswith(("bias", "sinks", "_hc.base", "kpool_compress_ape", "kpool_compress_gate", "A_log")):
            torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(path)
    return Path(path)


VISION_TOWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kimi_k25": (
        "deepseek_v3",
        {"num_hidden_layers": 1, "num_attention_heads": 2, **dict.fromkeys(("pos_emb_height", "pos_emb_width", "pos_emb_time"), 2)},
        {"projection_hidden_size": 16, "image_token_id": 258, "video_token_id": 259},
    ),
    "glm5_next": ("glm5_next_text", {"depth": 1, "num_heads": 2, "out_hidden_size": 48, "projection_intermediate_size": 20}, {}),
}
"""Of families that have one: the language model's own type, the tower's size, and what else the model needs."""


def _beside_a_vision_tower(family: str, values: dict[str, Any]) -> dict[str, Any]:
    text_type, tower, own = VISION_TOWERS[family]
    vision = {"hidden_size": 16, "intermediate_size": 20, "patch_size": 2, **tower}
    return {"text_config": values | {"model_type": text_type}, "vision_config": vision, "tie_word_embeddings": False, **own}


def plain_layout(num_kv_heads: int, head_dim: int) -> CacheLayout:
    """Cache of two layers of plain attention."""
    return CacheLayout(pages=(PageShape(num_kv_heads, head_dim, head_dim),) * 2)


class Runner:
    """Feeds chunks of several sequences to a model; each sequence gets pages of its own in a scattered order."""

    def __init__(self, loaded: LoadedModel, num_sequences: int, max_tokens: int = 96):
        self.loaded = loaded
        self.per_sequence = -(-max_tokens // PAGE_SIZE)
        num_pages = num_sequences * self.per_sequence
        self.kv = KVCache(loaded.config.cache_layout, num_pages, PAGE_SIZE, loaded.dtype, loaded.device, num_states=num_sequences)
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
        self.pages = shuffled.view(num_sequences, self.per_sequence)
        self.lengths = [0] * num_sequences

    def step(self, chunks: dict[int, list[int]], extra_pages: int = 0, return_routed: bool = False) -> dict[int, torch.Tensor]:
        """Run {sequence: next tokens} and return each one's logits [tokens, vocabulary]; single tokens go first, as decode rows."""
        order = sorted(chunks, key=lambda sequence: len(chunks[sequence]) > 1)
        positions = [torch.arange(self.lengths[s], self.lengths[s] + len(chunks[s])) for s in order]
        slots = [
            self.pages[s][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE for s, position in zip(order, positions, strict=True)
        ]
        for s in order:
            self.lengths[s] += len(chunks[s])
        num_pages = max(-(-self.lengths[s] // PAGE_SIZE) for s in order)
        table = torch.zeros(len(order), num_pages + extra_pages, dtype=torch.int64)
        for row, s in enumerate(order):
            used = -(-self.lengths[s] // PAGE_SIZE)
            table[row, :used] = self.pages[s][:used]
        sizes = [len(chunks[s]) for s in order]
        starts = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        batch = PackedBatch(
            input_ids_T=torch.tensor([token for s in order for token in chunks[s]]),
            positions_T=torch.cat(positions),
            kv_slots_T=torch.cat(slots),
            query_starts=starts,
            num_decode=sum(size == 1 for size in sizes),
            state_B=torch.tensor(order),
            context_lens_B=torch.tensor([self.lengths[s] for s in order]),
            page_table_BP=table,
            logit_index_M=torch.arange(starts[-1]),
            prefill_contexts=[self.lengths[s] for s in order if len(chunks[s]) > 1],
            return_routed=return_routed,
        )
        output = self.loaded.model.forward(batch, self.kv)
        self.routed = output.routed_TLK
        return {s: output.logits_MV[starts[row] : starts[row + 1]] for row, s in enumerate(order)}
