"""The same token gets the same logits whatever shares its batch: closely in ordinary mode, bit for bit in deterministic mode."""

import functools
import random

import pytest
import torch
from tiny_models import Runner, tiny_moe

from batchgen.arithmetic import Arithmetic
from batchgen.errors import ModelError
from batchgen.models.registry import load_model

TOKENS = random.Random(3).choices(range(256), k=70)
OTHERS = [random.Random(100 + i).choices(range(256), k=5 + 7 * i % 61) for i in range(40)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request, products, tmp_path_factory):
    folder = tiny_moe(tmp_path_factory.mktemp("moe"))
    return functools.cache(lambda deterministic: load_model(str(folder), request.param, "cpu", deterministic))


def whole(model) -> torch.Tensor:
    return Runner(model, 1).step({0: TOKENS})[0]


def chunked(model, size: int) -> torch.Tensor:
    runner = Runner(model, 1)
    return torch.cat([runner.step({0: TOKENS[start : start + size]})[0] for start in range(0, len(TOKENS), size)])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 64])
def test_chunked_prefill_is_bitwise_the_whole_prefill(loaded, size):
    assert torch.equal(chunked(loaded(True), size), whole(loaded(True)))


@pytest.mark.parametrize("num_others", [1, 2, 7, 15, 16, 17, 40])
def test_logits_are_bitwise_the_same_alone_and_in_any_batch(loaded, num_others):
    runner = Runner(loaded(True), num_others + 1)
    place = num_others // 2
    others = iter(OTHERS)
    chunks = {s: TOKENS if s == place else next(others) for s in range(num_others + 1)}
    assert torch.equal(runner.step(chunks)[place], whole(loaded(True)))


@pytest.mark.parametrize("place", [0, 3, 18, 39])
def test_decode_among_others_is_bitwise_the_prefill(loaded, place):
    runner = Runner(loaded(True), 40)
    chunks = {s: TOKENS[:30] if s == place else OTHERS[s] for s in range(40)}
    rows = [runner.step(chunks)[place]]
    for i in range(30, 45):
        step = {s: [TOKENS[i] if s == place else (i * s) % 256] for s in range(40) if s == place or (s + i) % 3}
        rows.append(runner.step(step, extra_pages=i % 4)[place])
    assert torch.equal(torch.cat(rows), whole(loaded(True))[:45])


def test_decode_beside_a_prefill_is_bitwise_the_same(loaded):
    runner = Runner(loaded(True), 3)
    rows = [runner.step({0: TOKENS[:40]})[0]]
    rows.append(runner.step({0: TOKENS[40:41], 1: OTHERS[8], 2: OTHERS[5]})[0])
    rows.append(runner.step({0: TOKENS[41:48], 1: [7]})[0])
    assert torch.equal(torch.cat(rows), whole(loaded(True))[:48])


def test_a_matrix_library_that_depends_on_the_row_is_found_out(monkeypatch):
    arithmetic = Arithmetic(storage_dtype=torch.float32, device=torch.device("cpu"), deterministic=True)
    arithmetic.check_invariance([torch.ones(6, 8), torch.ones(7, 8)])
    monkeypatch.setattr(arithmetic, "linear", lambda x, weight: x @ weight.T + torch.arange(len(x))[:, None] * 1e-6)
    with pytest.raises(ModelError, match=r"\[6, 8\].*deterministic"):
        arithmetic.check_invariance([torch.ones(6, 8)])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_ordinary_mode_agrees_up_to_rounding(loaded, size):
    tolerance = 1e-4 if loaded(False).dtype == torch.float32 else 0.1
    torch.testing.assert_close(chunked(loaded(False), size), whole(loaded(False)), atol=tolerance, rtol=tolerance)


def test_deterministic_mode_agrees_with_ordinary_mode(loaded):
    torch.testing.assert_close(whole(loaded(True)), whole(loaded(False)), atol=1e-1, rtol=1e-2)
