"""The bundled model: small, a mixture of experts, and the same to transformers, the engine and the demo's trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen import LLM, SamplingParams
from batchgen.text.tokenizer import Tokenizer
from rollout.demo.config import BUNDLED_MODEL
from rollout.demo.policy import Packed, Policy
from rollout.demo.tasks import KINDS, make_items

CHATS = [[{"role": "user", "content": item.question}] for item in make_items(10, 11, KINDS)]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(BUNDLED_MODEL), dtype="float32", num_threads=1)


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [len(ids) - 1] of every id given those before it."""
    scores_TV = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return scores_TV[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def test_the_checkpoint_is_a_small_mixture_of_experts() -> None:
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["num_experts"] >= 16 and config["num_experts_per_tok"] == 4
    assert sum(path.stat().st_size for path in BUNDLED_MODEL.glob("*.safetensors")) <= 16_000_000
    names = {path.name for path in BUNDLED_MODEL.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "model.safetensors", "README.md"} <= names


def test_transformers_computes_the_engines_logprobs(reference: Any, llm: LLM) -> None:
    assert 3e6 < sum(parameter.numel() for parameter in reference.parameters()) < 10e6
    for group in llm.generate(CHATS, SamplingParams(n=2, max_tokens=40, prompt_logprobs=0)):
        for sample in group.samples:
            expected = logprobs(reference, group.prompt_token_ids + sample.token_ids)
            found = torch.tensor(group.prompt_logprobs[1:] + sample.logprobs)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_greedy_answers_are_transformers_own(reference: Any, llm: LLM) -> None:
    for group in llm.generate(CHATS[:4], SamplingParams(temperature=0.0, max_tokens=24)):
        prompt = torch.tensor([group.prompt_token_ids])
        ids = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, temperature=None, max_new_tokens=24)
        assert ids[0, prompt.shape[1] :].tolist() == group.samples[0].token_ids


def test_the_chat_template_and_ids_are_transformers_own() -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(BUNDLED_MODEL), Tokenizer.from_folder(BUNDLED_MODEL)
    talk = [*CHATS[0], {"role": "assistant", "content": "#### 5"}, {"role": "user", "content": "12 + 3 — sure? äöü"}]
    for messages in [*CHATS, talk]:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.apply_chat_template(messages) == list(expected)
    assert ours.decode(ours.encode(talk[2]["content"])) == talk[2]["content"]


def test_the_trainers_policy_computes_transformers_logits(reference: Any, llm: LLM) -> None:
    sequences = [llm.engine.tokenizer.apply_chat_template(chat) for chat in CHATS[:5]]
    packed = Packed.of(sequences)
    with torch.no_grad():
        logits_TV, _ = Policy.from_folder(BUNDLED_MODEL)(packed, torch.arange(len(packed.ids_T)))
        expected_TV = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in sequences])
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=1e-4)


def test_a_saved_policy_is_the_bundled_checkpoint_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    Policy.from_folder(BUNDLED_MODEL).save(tmp_path)
    saved, bundled = load_file(tmp_path / "model.safetensors"), load_file(BUNDLED_MODEL / "model.safetensors")
    assert saved.keys() == bundled.keys()
    assert all(torch.equal(saved[name], bundled[name]) for name in saved)
