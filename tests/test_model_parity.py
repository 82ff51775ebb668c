"""Logits of our decoder against transformers on tiny random checkpoints, in float32."""

import pytest
import torch
from tiny_models import Runner, tiny_moe

from batchgen.models.registry import LoadedModel, load_model

PROMPTS = [[5, 9, 250, 3, 3, 17, 80], [41], list(range(30, 71)), [7, 8, 9] * 6]


def reference_logits(folder, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def assert_parity(folder, loaded: LoadedModel) -> None:
    got = Runner(loaded, len(PROMPTS)).step(dict(enumerate(PROMPTS)))
    for sequence, tokens in enumerate(PROMPTS):
        torch.testing.assert_close(got[sequence], reference_logits(folder, tokens), atol=1e-4, rtol=0)


VARIANTS = {
    "plain": {},
    "tied_head": {"tie_word_embeddings": True},
    "dense_layers": {"mlp_only_layers": [1]},
    "sparse_step": {"decoder_sparse_step": 2},
    "attention_bias": {"attention_bias": True},
    "unnormalised_router": {"norm_topk_prob": False},
    "other_rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_grouping": {"num_key_value_heads": 4},
    "odd_experts": {"num_experts": 7, "num_experts_per_tok": 7},
}


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(tmp_path, variant):
    folder = tiny_moe(tmp_path, **VARIANTS[variant])
    assert_parity(folder, load_model(str(folder), "float32", "cpu", deterministic=False))
