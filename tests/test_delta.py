"""Layers that carry a state: their ways to compute agree, and what a sequence holds comes back whatever happens to it."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model

from batchgen import SamplingParams
from batchgen.attention import delta
from batchgen.config import EngineConfig
from batchgen.engine import Engine
from batchgen.events import SampleFinished
from batchgen.kernels import cpu
from batchgen.packing import Spans
from batchgen.request import Request

triton_delta = pytest.importorskip("batchgen.kernels.delta")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1, 3), (2, 2, 8, 12), (3, 1, 24, 5), (1, 4, 33, 16)]


def make_spans(lengths, fresh):
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    places = torch.randperm(len(lengths) + 2)[: len(lengths)]
    return Spans(starts=starts, start_B=torch.tensor(starts), state_B=places, fresh_B=torch.tensor(fresh).long())


def on_device(spans):
    return replace(spans, start_B=spans.start_B.to(DEVICE), state_B=spans.state_B.to(DEVICE), fresh_B=spans.fresh_B.to(DEVICE))


def draw(lengths, heads, groups, depth, width, wide):
    num_tokens, num_values = sum(lengths), heads * groups
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(num_tokens, heads, depth), dim=-1) for _ in range(2))
    decay = -torch.rand(num_tokens, num_values, *[depth] * wide) * 4
    states = torch.randn(len(lengths) + 2, num_values, depth, width)
    return q, k, torch.randn(num_tokens, num_values, width), decay, torch.rand(num_tokens, num_values), states


def by_definition(q, k, v, decay, beta, states, spans):
    """In float64, a matrix product for every token and head."""
    out, states = torch.empty(v.shape, dtype=torch.float64), states.double()
    groups = v.shape[1] // q.shape[1]
    for b, place in enumerate(spans.state_B.tolist()):
        for head in range(v.shape[1]):
            state = torch.zeros_like(states[place, head]) if spans.fresh_B[b] else states[place, head]
            for t in range(spans.starts[b], spans.starts[b + 1]):
                key, query = k[t, head // groups].double(), q[t, head // groups].double()
                kept = torch.diag(decay[t, head].double().exp().expand(len(key)))
                state = kept @ state
                state = state + beta[t, head].double() * torch.outer(key, v[t, head].double() - state.T @ key)
                out[t, head] = state.T @ query
            states[place, head] = state
    return out, states


@pytest.mark.parametrize("form", ["kernel", "triton", "recurrent", "chunked"])
@pytest.mark.parametrize("wide", [False, True], ids=["per head", "per key dimension"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [70, 1, 33, 5], [32]])
def test_the_delta_rule_is_what_its_definition_says(form, wide, shape, lengths):
    if form == "triton" and DEVICE == "cpu":
        lengths = [min(length, 7) for length in lengths]  # the interpreter takes its time
    torch.manual_seed(len(lengths))
    heads, groups, depth, width = shape
    spans = make_spans(lengths, [i % 2 == 0 for i in range(len(lengths))])
    *inputs, states = draw(lengths, heads, groups, depth, width, wide)
    expected, expected_states = by_definition(*inputs, states, spans)
    if form == "kernel":
        if (kernels := cpu.load()) is None:
            pytest.skip("needs a C compiler")
        out = kernels.delta_rule(*inputs, states, spans)
    elif form == "triton":
        states = states.to(DEVICE)
        out = triton_delta.delta_rule(*(x.to(DEVICE) for x in inputs), states, on_device(spans)).cpu()
        states = states.cpu()
    else:
        out = delta.delta_rule(*inputs, states, spans, exact=form == "recurrent")
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.double(), expected_states, atol=1e-4, rtol=1e-4)


def test_chunks_hold_decays_that_underflow():
    torch.manual_seed(0)
    spans = make_spans([64], [True])
    q, k, v, decay, beta, states = draw([64], 2, 1, 8, 8, True)
    out = delta.delta_rule(q, k, v, decay * 1000, beta, states, spans, exact=False)
    expected, _ = by_definition(q, k, v, decay * 1000, beta, states, spans)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1, 1], [9, 1, 2, 40]])
@pytest.mark.parametrize("num_taps", [1, 2, 4])
def test_a_convolution_sees_the_sequences_last_inputs_and_no_others(lengths, num_taps):
    torch.manual_seed(1)
    spans = make_spans(lengths, [i % 2 == 1 for i in range(len(lengths))])
    channels = 70
    x, taps = torch.randn(sum(lengths), channels), torch.randn(channels, num_taps)
    states = torch.randn(len(lengths) + 2, channels, num_taps - 1)
    expected, ends = torch.empty_like(x), states.clone()
    for b, place in enumerate(spans.state_B.tolist()):
        past = torch.zeros(channels, num_taps - 1) if spans.fresh_B[b] else states[place]
        line = torch.cat((past, x[spans.starts[b] : spans.starts[b + 1]].T), dim=1)
        for i in range(lengths[b]):
            expected[spans.starts[b] + i] = torch.nn.functional.silu((line[:, i : i + num_taps] * taps).sum(1))
        ends[place] = line[:, line.shape[1] - num_taps + 1 :]
    ways = [delta.convolve] + ([cpu.load().convolve] if cpu.load() else [])
    for convolve in ways:
        own = states.clone()
        torch.testing.assert_close(convolve(x, taps, own, spans), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(own, ends)
    own = states.to(DEVICE)
    got = triton_delta.convolve(x.to(DEVICE), taps.to(DEVICE), own, on_device(spans))
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(own.cpu(), ends)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_decays_are_the_same_with_and_without_kernels(bound):
    x, rate, bias = torch.randn(5, 3, 7) * 20, torch.randn(3), torch.randn(3, 7)
    if (kernels := cpu.load()) is None:
        pytest.skip("needs a C compiler")
    torch.testing.assert_close(kernels.log_decay(x, rate, bias, bound), delta.log_decay(x, rate, bias, bound), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("qwen3_next", tmp_path_factory.mktemp("stateful"))


def test_states_come_back_through_groups_aborts_yields_and_updates(folder):
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", max_num_seqs=4, page_size=4, kv_gb=0.00008, num_threads=1))
    params = SamplingParams(n=7, max_tokens=30, ignore_eos=True)
    for i in range(6):
        ids = list(range(1, 4 + i))
        engine.submit(Request(request_id=str(i), prompt_token_ids=ids, params=params, sample_indices=list(range(7)), seed_base=i))
    finished, steps = 0, 0
    while engine.has_work:
        finished += sum(isinstance(event, SampleFinished) for event in engine.step())
        engine.residency.check()
        steps += 1
        if steps == 3:
            engine.abort("1", [0, 3])
        if steps == 6:
            engine.abort("2")
        if steps == 9:
            stage = engine.weights.open(1)
            for name, slot in engine.weights.table.slots.items():
                if not slot.covers and slot.alias_of is None:
                    stage.put(name, slot.view.reshape(slot.checkpoint_shape) - slot.offset)
            engine.commit_weights(stage, "continue")
    assert finished == 42 and engine.stats().preemptions > 0
    assert engine.residency.places.num_used == 0 and engine.pool.num_used == 0


def test_the_memory_plan_counts_states(folder):
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", max_num_seqs=9, num_threads=1))
    states = engine.residency.kv.states
    assert engine.memory.state_bytes == sum(state.nbytes for state in states) > 0
    assert "states" in engine.memory.table()
