"""Rows are islands: batch mates, order, preemption, bad logits and failures of others never change a row's result, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.draw import Filters, draw, draw_ranked, greedy, ranked
from batchgen.request import sample_seed
from batchgen.sampler import SampledTokens, Sampler
from batchgen.sampling_params import SamplingParams

EOS = [0]
KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 300, "temperature": 1.5},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.99},
    {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"min_p": 0.05},
    {"logprobs": 3},
    {"logprobs": 7, "logprobs_mode": "raw", "temperature": 0.5},
    {"logprobs_mode": "raw", "temperature": 2.0},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5, "temperature": 0.0},
    {"repetition_penalty": 1.3, "top_p": 0.95},
    {"logit_bias": {3: 5.0, 9: -100.0}},
    {"allowed_token_ids": [4, 8, 15, 16, 23, 31]},
    {"min_tokens": 2, "stop_token_ids": [1, 2]},
    {"presence_penalty": 2.0, "repetition_penalty": 0.8, "logit_bias": {5: 3.0}, "min_p": 0.01, "logprobs": 2},
]
WORDS: dict[int, list[list[int]]] = {0: [[7]], 5: [[3, 4], [5]], 18: [[3, 3, 3]], 21: [[1, 2, 3, 4]]}


class Run:
    """Some of the kinds, each in a slot of its own, sampled step by step."""

    def __init__(self, kinds: list[int], vocab: int, num_slots: int = 40):
        self.kinds, self.sampler = kinds, Sampler(vocab, num_slots)
        self.slots = [(7 * i + 3) % num_slots for i in range(len(kinds))]
        self.outputs: list[list[int]] = [[] for _ in kinds]
        for i in range(len(kinds)):
            self.admit(i)

    def admit(self, i: int) -> None:
        kind = self.kinds[i]
        params = SamplingParams(**KINDS[kind])
        self.sampler.set_slot(self.slots[i], params, sample_seed(1, kind), [3, 3, 5], self.outputs[i], EOS, WORDS.get(kind, []))

    def step(self, logits_of_kind: torch.Tensor) -> SampledTokens:
        counts = torch.tensor([len(o) for o in self.outputs])
        out = self.sampler.sample(logits_of_kind[self.kinds], torch.tensor(self.slots), counts)
        for output, token in zip(self.outputs, out.token_ids_B.tolist(), strict=True):
            output.append(token)
        return out


def logits_of_kinds(vocab: int, seed: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(len(KINDS), vocab, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(dtype).float()


def same_row(a: SampledTokens, i: int, b: SampledTokens, j: int, kind: int) -> bool:
    k = KINDS[kind].get("logprobs", 0)
    same = a.token_ids_B[i] == b.token_ids_B[j] and torch.equal(a.logprobs_B[i], b.logprobs_B[j]) and a.failed_B[i] == b.failed_B[j]
    if k:
        same = same and torch.equal(a.top_ids_BK[i, :k], b.top_ids_BK[j, :k])
        same = same and torch.equal(a.top_logprobs_BK[i, :k], b.top_logprobs_BK[j, :k])
    return bool(same)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(33, torch.float32), (1000, torch.float32), (8192, torch.float32), (1024, torch.bfloat16), (70_001, torch.bfloat16)],
)
def test_a_row_is_bit_identical_alone_among_others_and_in_any_order(vocab: int, dtype: torch.dtype):
    everyone, num_steps = (list(range(len(KINDS))), 4) if vocab <= 1024 else (list(range(1, len(KINDS), 4)), 1)
    together, reversed_, twice = Run(everyone, vocab), Run(everyone[::-1], vocab), Run(everyone[::2], vocab)
    alone = [Run([kind], vocab) for kind in everyone]
    for t in range(num_steps):
        logits = logits_of_kinds(vocab, t, dtype=dtype)
        out, backwards, half = together.step(logits), reversed_.step(logits), twice.step(logits)
        for i, kind in enumerate(everyone):
            assert same_row(out, i, alone[i].step(logits), 0, kind), KINDS[kind]
            assert same_row(out, i, backwards, len(everyone) - 1 - i, kind), KINDS[kind]
            assert i % 2 or same_row(out, i, half, i // 2, kind), KINDS[kind]


def test_a_preempted_row_goes_on_exactly_as_an_undisturbed_one():
    kinds = list(range(len(KINDS)))
    calm, disturbed = Run(kinds, 40), Run(kinds, 40)
    for t in range(8):
        if t in (3, 6):
            for slot in disturbed.slots:
                disturbed.sampler.clear_slot(slot)
            disturbed.slots = disturbed.slots[5:] + disturbed.slots[:5]
            for i in kinds:
                disturbed.admit(i)
        logits = logits_of_kinds(40, t, scale=1.0)
        a, b = calm.step(logits), disturbed.step(logits)
        assert all(same_row(a, kind, b, kind, kind) for kind in kinds)


def test_a_slot_keeps_nothing_of_the_sequence_before():
    used, fresh = Run(list(range(len(KINDS))), 40), None
    used.step(logits_of_kinds(40, 0))
    for slot in used.slots:
        used.sampler.clear_slot(slot)
    used.kinds, used.outputs = used.kinds[::-1], [[] for _ in KINDS]
    for i in range(len(KINDS)):
        used.admit(i)
    fresh = Run(list(range(len(KINDS)))[::-1], 40)
    for t in range(3):
        logits = logits_of_kinds(40, t)
        a, b = used.step(logits), fresh.step(logits)
        assert all(same_row(a, i, b, i, used.kinds[i]) for i in range(len(KINDS)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_fail_their_row_alone(bad: float):
    kinds = list(range(len(KINDS)))
    for broken in kinds:
        run, clean = Run(kinds, 40), Run(kinds, 40)
        for t in range(2):
            logits = logits_of_kinds(40, t)
            spoilt = logits.clone()
            spoilt[broken, 11] = bad
            out, expected = run.step(spoilt), clean.step(logits)
            assert out.failed_B.nonzero().flatten().tolist() == [broken] and not out.blocked_B.any()
            assert out.token_ids_B[broken] == 0 and out.logprobs_B[broken] == 0.0
            assert all(same_row(out, kind, expected, kind, kind) for kind in kinds if kind != broken)


def test_a_row_with_every_token_masked_is_blocked_alone():
    sampler = Sampler(10, 3)
    sampler.set_slot(0, SamplingParams(), 1, [], [], EOS, [])
    sampler.set_slot(1, SamplingParams(allowed_token_ids=[0, 4], stop_token_ids=[4], min_tokens=2), 2, [], [], EOS, [])
    sampler.set_slot(2, SamplingParams(temperature=0.0, allowed_token_ids=[5]), 3, [], [], EOS, [[5]])
    out = sampler.sample(torch.randn(3, 10), torch.arange(3), torch.tensor([0, 1, 0]))
    assert out.failed_B.tolist() == out.blocked_B.tolist() == [False, True, True]
    assert out.logprobs_B.isfinite().all()
    late = sampler.sample(torch.randn(3, 10), torch.arange(3), torch.tensor([0, 2, 0]))
    assert late.failed_B.tolist() == [False, False, True] and late.token_ids_B[1] in (0, 4)


def test_failed_rows_do_not_count_for_penalties():
    sampler = Sampler(4, 1)
    sampler.set_slot(0, SamplingParams(temperature=0.0, presence_penalty=2.0), 1, [], [], EOS, [[0, 1]])
    slots, first = torch.tensor([0]), torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    assert sampler.sample(torch.full((1, 4), torch.nan), slots, torch.tensor([0])).failed_B.all()
    assert [int(sampler.sample(first, slots, torch.tensor([n])).token_ids_B) for n in range(3)] == [0, 2, 1]


def test_penalties_keep_count_of_outputs_of_any_length():
    vocab = 600
    sampler = Sampler(vocab, 1)
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=0.1)
    sampler.set_slot(0, params, 1, list(range(vocab)), [], EOS, [])
    logits = torch.zeros(1, vocab)
    outputs = [int(sampler.sample(logits, torch.tensor([0]), torch.tensor([n])).token_ids_B) for n in range(2 * vocab)]
    assert outputs == list(range(vocab)) * 2
    sampler.set_slot(0, params, 1, [], outputs[:900], EOS, [])
    assert [int(sampler.sample(logits, torch.tensor([0]), torch.tensor([n])).token_ids_B) for n in range(900, 1200)] == outputs[900:]


def test_samples_of_one_group_differ_and_are_reproducible():
    def group() -> list[list[int]]:
        sampler = Sampler(1000, 8)
        for i in range(8):
            sampler.set_slot(i, SamplingParams(seed=5, n=8), sample_seed(5, i), [1], [], EOS, [])
        steps = [sampler.sample(torch.zeros(8, 1000), torch.arange(8), torch.full((8,), t)).token_ids_B for t in range(4)]
        return torch.stack(steps, 1).tolist()

    assert group() == group()
    assert len({tuple(tokens) for tokens in group()}) == 8


def test_logits_are_left_as_they_are():
    run = Run(list(range(len(KINDS))), 40)
    logits = logits_of_kinds(40, 0)
    kept = logits.clone()
    run.sampler.sample(logits, torch.tensor(run.slots), torch.zeros(len(KINDS), dtype=torch.int64))
    assert torch.equal(logits, kept)


def test_no_rows_give_no_tokens():
    out = Run([0], 40).sampler.sample(torch.zeros(0, 40), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert len(out.token_ids_B) == len(out.failed_B) == 0


weights = st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32), st.sampled_from([1e-38, 1e-8, 1.0]))


@settings(max_examples=100, deadline=None)
@given(st.lists(weights, min_size=1, max_size=70).filter(any), st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-32, 1 - 2.0**-53]))
def test_no_uniform_draws_a_token_of_probability_zero(row: list[float], uniform: float):
    probs = torch.tensor([row]) / sum(row)
    probs = torch.where(probs.isfinite(), probs, 1.0)
    u = torch.tensor([uniform], dtype=torch.float64)
    token = int(draw(probs, u))
    assert token < len(row) and probs[0, token] > 0
    filters = Filters(top_k_R=torch.tensor([len(row)]), top_p_R=torch.tensor([0.999999]), min_p_R=torch.tensor([0.0]))
    token = int(draw_ranked(probs.log(), probs, u, filters, 4))
    assert token < len(row) and probs[0, token] > 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 90), st.sampled_from([0.0, 0.2, 1.0, 4.0]), st.booleans())
def test_the_size_of_the_first_look_does_not_change_a_ranked_draw(seed: int, vocab: int, scale: float, ties: bool):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator) * scale
    logits = logits.round() if ties else logits
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    top_p = torch.rand(6, generator=generator, dtype=torch.float64)
    filters = Filters(top_k_R=torch.full((6,), vocab), top_p_R=top_p, min_p_R=torch.zeros(6, dtype=torch.float64))
    results = [draw_ranked(logits, logits.softmax(1), uniform, filters, prefix).tolist() for prefix in (1, 2, 7, 64, 1000)]
    assert all(result == results[0] for result in results)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(-3, 3), st.just(float("-inf")), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=80))
def test_ranked_is_a_stable_descending_sort_and_greedy_its_first(row: list[float]):
    logits = torch.tensor([row], dtype=torch.float32)
    expected = logits.sort(dim=1, descending=True, stable=True).indices
    for k in {1, len(row), (len(row) + 1) // 2}:
        assert torch.equal(ranked(logits, k), expected[:, :k])
    assert torch.equal(greedy(logits), expected[:, 0])
