"""Quantised checkpoints: computed as an independent decoder reads them, packed in memory, updated by a trainer, refused when broken."""

import random
from pathlib import Path

import pytest
import torch
from quantised_models import KINDS, checkpoints, quantise
from safetensors.torch import load_file
from tiny_models import Runner
from transformers import AutoModelForCausalLM

from batchgen import LLM, SamplingParams
from batchgen.models.registry import LoadedModel, load_model
from batchgen.quant.packed import Packed

PROMPTS = [[random.Random(i).randrange(256) for _ in range(n)] for i, n in enumerate((7, 1, 41, 18))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    return request.param, *checkpoints(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, deterministic: bool = False) -> LoadedModel:
    return load_model(str(folder), "float32", "cpu", deterministic)


def logits(loaded: LoadedModel) -> dict[int, torch.Tensor]:
    return Runner(loaded, len(PROMPTS)).step(dict(enumerate(PROMPTS)))


def make(folder: Path, **options) -> LLM:
    return LLM(str(folder), dtype="float32", kv_gb=0.01, max_model_len=96, **options)


def tokens(llm: LLM) -> list[list[int]]:
    return [group.samples[0].token_ids for group in llm.generate(PROMPTS, GREEDY)]


def test_logits_are_those_of_the_independently_decoded_weights(made, products):
    _, packed, plain, _ = made
    got, ours = logits(load(packed)), logits(load(plain))
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(got[i], ours[i], atol=1e-4, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(got[i], theirs(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_tokens_are_those_of_the_decoded_weights(made, products, deterministic):
    _, packed, plain, source = made
    want = tokens(make(plain, deterministic=deterministic))
    assert tokens(make(packed, deterministic=deterministic)) == want
    assert tokens(make(source)) != want


def test_quantised_matrices_stay_packed_and_no_more_is_held_than_is_stored(made):
    name, packed, _, _ = made
    loaded, kind = load(packed), KINDS[name]
    stored = load_file(packed / "model.safetensors")
    held = sum(storage.nbytes for storage in loaded.store.table.storages())
    decoded = [name for name in stored if "kv_b_proj.weight" in name and kind.form.suffixes[1] in name]
    assert held - sum(load_file(packed / "model.safetensors")[name.removesuffix("_scale_inv")].numel() * 4 for name in decoded) <= sum(
        tensor.nbytes for tensor in stored.values()
    )
    packed_names = {slot.name for slot in loaded.store.table.slots.values() if isinstance(slot.view, Packed) and not slot.covers}
    assert packed_names == {name for name in load_file(made[3] / "model.safetensors") if kind.names.search(name) and "kv_b" not in name}


def test_a_trainers_weights_are_packed_into_the_same_storage(made, tmp_path):
    name, packed, _, _ = made
    _, _, new = checkpoints(name, tmp_path, seed=1)
    llm = make(packed)
    before = [storage.data_ptr() for storage in llm.engine.weights.table.storages()]
    old = tokens(llm)
    pushed = {key: tensor.bfloat16() for key, tensor in load_file(new / "model.safetensors").items()}
    kv_b = {key: tensor for key, tensor in pushed.items() if "kv_b_proj" in key}
    _, decoded = quantise(KINDS[name], {key: tensor.float() for key, tensor in pushed.items()})
    llm.update_weights(pushed.items(), version=1)
    assert [storage.data_ptr() for storage in llm.engine.weights.table.storages()] == before
    fresh = make(packed)
    fresh.update_weights((decoded | kv_b).items(), version=1)
    assert tokens(llm) == tokens(fresh) != old
