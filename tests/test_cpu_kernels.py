"""The CPU's compiled kernels against float64, at odd sizes; their bits, whatever surrounds a row; and a machine that cannot compile."""

import functools
import logging
import os

import pytest
import torch
from torch.nn import functional as F

from batchgen.kernels import cpu
from batchgen.models.rotary import Rope, rotary_table
from batchgen.moe import activation
from batchgen.moe.activation import SILU, Activation
from batchgen.moe.routing import Routing

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="needs a C compiler")


@functools.cache
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator())


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 1, 1), (3, 7, 5), (13, 100, 97), (300, 33, 64), (2, 5, 700)])
def test_a_dense_layer_equals_float64(dtype, sizes):
    num_tokens, num_outputs, depth = sizes
    x, weight = randn(num_tokens, depth), randn(num_outputs, depth).to(dtype)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(cpu.load().linear(x, weight), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outputs_bits_depend_on_its_own_row_alone(two_threads, dtype):
    kernels, x, weight = cpu.load(), randn(301, 77), randn(130, 77).to(dtype)
    whole = kernels.linear(x, weight)
    for start, end in ((0, 1), (5, 8), (100, 113), (299, 301)):
        assert torch.equal(kernels.linear(x[start:end], weight), whole[start:end])
    gate_up, down = randn(6, 2 * 50, 77).to(dtype), randn(6, 77, 50).to(dtype)
    weights, ids = randn(301, 6).softmax(-1).topk(3)
    together = kernels.experts(x, gate_up, down, ids, weights, SILU)
    for start, end in ((0, 1), (7, 12), (200, 301)):
        part = kernels.experts(x[start:end], gate_up, down, ids[start:end], weights[start:end], SILU)
        assert torch.equal(part, together[start:end])


@pytest.mark.parametrize("kind", ["silu", "clamped", "situ", "limited"])
@pytest.mark.parametrize("width", [1, 7, 16, 33])
def test_an_activation_is_what_plain_torch_computes(kind, width):
    x = torch.randn(5, 2 * width) * 6
    made = Activation(kind, a=1.7, b=2.5)
    torch.testing.assert_close(cpu.load().gate(x, made), activation.gate(x.double(), made).float(), atol=1e-5, rtol=1e-5)


def test_rows_that_are_not_side_by_side_are_read_where_they_are():
    wide, weight = randn(9, 60), randn(11, 20)
    torch.testing.assert_close(cpu.load().linear(wide[:, 20:40], weight), wide[:, 20:40] @ weight.T)
    torch.testing.assert_close(cpu.load().linear(wide.T, randn(3, 9)).shape, torch.Size([60, 3]))
    heads = wide.view(9, 6, 10)[:, 2:5]
    expected = F.rms_norm(heads, (10,), eps=1e-6) * (gains := randn(10))
    torch.testing.assert_close(cpu.load().rms_norm(heads, gains, 1e-6), expected, atol=1e-5, rtol=1e-5)


def test_heads_are_rotated_by_their_tokens_angle():
    table = rotary_table(40, 6, Rope(theta=100.0), torch.device("cpu"))[torch.arange(3, 12)]
    heads = randn(9, 30).view(9, 5, 6)[:, 1:4]
    complex_heads = torch.complex(heads[..., :3], heads[..., 3:])
    angles = torch.arange(3, 12)[:, None] / 100.0 ** (torch.arange(0, 6, 2) / 6)
    turned = complex_heads * torch.polar(torch.ones(9, 3), angles)[:, None]
    torch.testing.assert_close(cpu.load().rotate(heads, table), torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_experts", [1, 5, 8, 31])
def test_the_router_chooses_the_likeliest_and_ranks_equals_by_number(num_experts):
    logits = randn(40, num_experts) * 10
    logits[3] = 0.0
    k = min(4, num_experts)
    ids, weights = cpu.load().route(logits, Routing(num_experts=num_experts, num_experts_per_tok=k))
    expected = logits.double().softmax(-1)
    torch.testing.assert_close(weights, expected.topk(k).values.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights, expected.gather(1, ids).float(), atol=1e-6, rtol=1e-5)
    assert ids[3].tolist() == list(range(k))


def test_extreme_and_broken_values_stay_what_they_are():
    kernels, identity = cpu.load(), torch.eye(8)[None]
    gate_up = torch.cat((identity, identity), dim=1)
    x = torch.tensor([[-1e4, -100.0, -50.0, 0.0, 50.0, 100.0, 1e4, 3.0], [float("nan")] * 8, [float("inf")] * 8])
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    got = kernels.experts(x, gate_up, identity, ids, weights, SILU)
    torch.testing.assert_close(got[0], F.silu(x[0]) * x[0], atol=1e-6, rtol=1e-5)
    assert bool(got[1].isnan().all())
    assert not bool(got[2].isfinite().any())
    router = torch.zeros(2, 8)
    router[1, 5] = float("nan")
    _, routed = kernels.route(router, Routing(num_experts=8, num_experts_per_tok=2, normalise=True))
    assert bool(routed[0].isfinite().all())
    assert bool(routed[1].isnan().all())


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.load.cache_clear()
    yield tmp_path / "batchgen"
    cpu.load.cache_clear()


def test_kernels_are_compiled_once_for_a_source_and_a_processor(monkeypatch, fresh_cache):
    assert cpu.load() is not None
    (library,) = fresh_cache.iterdir()
    made = library.stat().st_mtime_ns
    cpu.load.cache_clear()
    assert cpu.load() is not None
    assert [path.stat().st_mtime_ns for path in fresh_cache.iterdir()] == [made]
    monkeypatch.setattr(cpu, "_processor", lambda: "another")
    cpu.load.cache_clear()
    cpu.load()
    assert len(list(fresh_cache.iterdir())) == 2


def test_without_a_compiler_plain_torch_works_and_the_log_says_so(monkeypatch, fresh_cache, caplog):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(fresh_cache))
    with caplog.at_level(logging.INFO):
        assert cpu.load() is None
    assert "no C compiler found" in caplog.text


def test_a_compiler_that_fails_is_named_with_what_it_said(monkeypatch, fresh_cache, caplog, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'disk is on fire' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert cpu.load() is None
    assert "broken-cc" in caplog.text
    assert "disk is on fire" in caplog.text
    assert os.listdir(tmp_path / "batchgen") == [] if (tmp_path / "batchgen").exists() else True
