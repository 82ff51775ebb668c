"""What is sampled and reported: every parameter against a plain reference, one row at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_reference import Row, adjusted_logits, candidates, is_right_draw, reported

from batchgen.request import sample_seed
from batchgen.rng import seed_words, uniforms
from batchgen.sampler import SampledTokens, Sampler, prompt_logprobs
from batchgen.sampling_params import SamplingParams

FLOAT32_LOWEST = float(torch.finfo(torch.float32).min)


def sampler_of(rows: list[Row], vocab: int) -> Sampler:
    sampler = Sampler(vocab, len(rows))
    for slot, row in enumerate(rows):
        sampler.set_slot(slot, row.params, row.seed, row.prompt, row.outputs, row.eos, row.bad_words)
    return sampler


def step(sampler: Sampler, rows: list[Row], logits: torch.Tensor) -> SampledTokens:
    return sampler.sample(logits, torch.arange(len(rows)), torch.tensor([len(row.outputs) for row in rows]))


def row_of(seed: int = 0, outputs: tuple[int, ...] = (), bad_words: tuple[list[int], ...] = (), **params: object) -> Row:
    return Row(SamplingParams(**params), sample_seed(seed, 0), [1, 2], list(outputs), [0], list(bad_words))


def check_step(rows: list[Row], logits: torch.Tensor, out: SampledTokens) -> None:
    """Each row's token is the reference's draw and its logprobs are the reference's."""
    for b, row in enumerate(rows):
        x = logits[b].numpy()
        if not candidates_exist(x, row):
            assert out.failed_B[b] and out.blocked_B[b]
            continue
        assert not out.failed_B[b] and not out.blocked_B[b]
        token = int(out.token_ids_B[b])
        u = float(uniforms(torch.tensor(seed_words(row.seed))[:, None], torch.tensor([[len(row.outputs)]])))
        assert is_right_draw(token, u, x, row)
        logprobs = reported(x, row.params)
        assert float(out.logprobs_B[b]) == pytest.approx(max(logprobs[token], FLOAT32_LOWEST), rel=1e-5, abs=1e-4)
        k = min(row.params.logprobs, len(x))
        if k:
            assert out.top_ids_BK[b, :k].tolist() == np.argsort(-x, kind="stable")[:k].tolist()
            tops = np.maximum(np.sort(logprobs)[::-1][:k], FLOAT32_LOWEST)
            assert np.allclose(out.top_logprobs_BK[b, :k].numpy(), tops, rtol=1e-5, atol=1e-4)


def candidates_exist(x: np.ndarray, row: Row) -> bool:
    return bool(np.isfinite(adjusted_logits(x, row)).any())


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Row], list[np.ndarray]]:
    """A vocabulary, rows with random parameters and histories, and the logits of three steps (multiples of 1/8, so ties happen)."""
    vocab = draw(st.sampled_from([3, 10, 33, 64, 130]))
    token = st.integers(0, vocab - 1)
    tokens = st.lists(token, max_size=6)
    words = st.lists(st.lists(token, min_size=1, max_size=3), max_size=3)

    def maybe(strategy: st.SearchStrategy, default: object) -> object:
        return draw(st.one_of(st.just(default), strategy))

    def eighths(low: float, high: float) -> st.SearchStrategy:
        """Like the logits: a difference that float32 rounds away would be a tie here and none in the reference."""
        return st.integers(int(low * 8), int(high * 8)).map(lambda n: n / 8)

    rows = []
    for i in range(draw(st.integers(1, 5))):
        params = SamplingParams(
            temperature=maybe(st.sampled_from([0.0, 0.3, 1.7]), 1.0),
            top_k=maybe(st.integers(1, vocab + 2), 0),
            top_p=maybe(st.floats(0.0, 1.0), 1.0),
            min_p=maybe(st.floats(0.0, 1.0), 0.0),
            presence_penalty=maybe(eighths(-2, 2), 0.0),
            frequency_penalty=maybe(eighths(-2, 2), 0.0),
            repetition_penalty=maybe(eighths(0.5, 2), 1.0),
            logit_bias=maybe(st.dictionaries(token, eighths(-100, 100), max_size=4), None),
            allowed_token_ids=maybe(st.lists(token, min_size=1, max_size=5), None),
            stop_token_ids=maybe(st.lists(token, max_size=2), None),
            min_tokens=maybe(st.integers(0, 4), 0),
            logprobs=maybe(st.integers(1, 8), 0),
            logprobs_mode=maybe(st.just("raw"), "processed"),
        )
        rows.append(Row(params, sample_seed(draw(st.integers(0, 99)), i), draw(tokens), draw(tokens), [0], draw(words)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    return vocab, rows, [(rng.integers(-40, 40, (len(rows), vocab)) / 8).astype(np.float32) for _ in range(3)]


@settings(max_examples=40, deadline=None)
@given(batches())
def test_every_parameter_does_what_the_reference_does_step_after_step(batch: tuple[int, list[Row], list[np.ndarray]]):
    vocab, rows, steps = batch
    sampler = sampler_of(rows, vocab)
    for array in steps:
        logits = torch.from_numpy(array)
        out = step(sampler, rows, logits)
        check_step(rows, logits, out)
        for row, token, failed in zip(rows, out.token_ids_B.tolist(), out.failed_B.tolist(), strict=True):
            if not failed:
                row.outputs.append(token)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.7, "min_p": 0.02, "temperature": 1.4},
        {"presence_penalty": 1.0, "repetition_penalty": 1.5, "logit_bias": {4: 2.0}},
    ],
)
@pytest.mark.parametrize("vocab", [40, 64])
def test_samples_follow_the_distribution(params: dict[str, float], vocab: int):
    count = 2_000
    rows = [Row(SamplingParams(**params), sample_seed(5, i), [1], [2, 2], [0], []) for i in range(count)]
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    tokens = step(sampler_of(rows, vocab), rows, logits.expand(count, vocab)).token_ids_B
    ids, probs = candidates(logits.numpy(), rows[0])
    expected = np.zeros(vocab)
    expected[ids] = probs * count
    observed = torch.bincount(tokens, minlength=vocab).numpy()
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    freedom = max(common.sum() - 1, 1)
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 5  # far beyond any plausible chance; the seeds are fixed


def test_successive_positions_of_one_seed_follow_the_distribution():
    count, vocab = 4_000, 16
    sampler = Sampler(vocab, count)
    for slot in range(count):
        sampler.set_slot(slot, SamplingParams(), sample_seed(9, 9), [], [], [], [])
    logits = torch.linspace(0, 2, vocab)
    tokens = sampler.sample(logits.expand(count, vocab), torch.arange(count), torch.arange(count)).token_ids_B
    expected = logits.double().softmax(0).numpy() * count
    assert ((torch.bincount(tokens).numpy() - expected) ** 2 / expected).sum() < 44.3  # 15 degrees of freedom, p = 1e-4


def test_logprobs_are_processed_by_default_and_raw_on_request():
    logits = torch.randn(4, 50) * 3
    rows = [
        row_of(temperature=t, logprobs_mode=m, seed=i)
        for i, (t, m) in enumerate([(0.5, "processed"), (0.5, "raw"), (0.0, "processed"), (2.0, "raw")])
    ]
    out = step(sampler_of(rows, 50), rows, logits)
    for b, scale in enumerate([0.5, 1.0, 1.0, 1.0]):
        expected = torch.log_softmax(logits[b] / scale, 0)[out.token_ids_B[b]]
        assert float(out.logprobs_B[b]) == pytest.approx(float(expected), abs=1e-5)


def test_logprobs_ignore_penalties_masks_and_filters():
    logits = torch.randn(4, 50)
    rows = [row_of(logit_bias={7: 100.0}), row_of(allowed_token_ids=[7]), row_of(top_k=1), row_of(outputs=(7,) * 3, frequency_penalty=-2.0)]
    out = step(sampler_of(rows, 50), rows, logits)
    expected = torch.log_softmax(logits, 1).gather(1, out.token_ids_B[:, None])[:, 0]
    assert torch.allclose(out.logprobs_B, expected, atol=1e-5)
    assert out.token_ids_B[:2].tolist() == [7, 7]


def test_logprobs_of_sampled_tokens_are_finite_at_every_temperature_in_one_batch():
    logits = torch.randn(6, 300) * 10
    logits[:, 200:] = -torch.inf
    rows = [row_of(temperature=t, allowed_token_ids=a) for t in (0.0, 1e-300, 1e-6) for a in (None, [3])]
    rows += [row_of(temperature=1.0), row_of(temperature=1e6)]
    logits = torch.cat([logits, logits[:2]])
    out = step(sampler_of(rows, 300), rows, logits)
    assert not out.failed_B.any() and out.logprobs_B.isfinite().all()
    assert out.token_ids_B[[0, 2, 4]].tolist() == logits[[0, 2, 4]].argmax(1).tolist()
    assert out.token_ids_B[[1, 3, 5]].tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "params", [{"top_p": 0.0}, {"top_p": 1e-8}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 0.0}]
)
def test_the_top_token_always_survives(params: dict[str, float]):
    logits = torch.randn(32, 1000)
    rows = [row_of(seed=i, **params) for i in range(32)]
    assert step(sampler_of(rows, 1000), rows, logits).token_ids_B.tolist() == logits.argmax(1).tolist()


def test_equal_logits_rank_by_id():
    logits = torch.zeros(64, 500)
    logits[:, 10:] = 1.0
    for params, allowed in (({"top_k": 3}, {10, 11, 12}), ({"temperature": 0.0}, {10}), ({"top_k": 1}, {10}), ({"top_p": 0.0}, {10})):
        rows = [row_of(seed=i, **params) for i in range(64)]
        assert set(step(sampler_of(rows, 500), rows, logits).token_ids_B.tolist()) == allowed


def test_wide_nuclei_reach_beyond_the_first_ranked_tokens():
    logits = torch.randn(200, 2000) * 0.5
    rows = [row_of(seed=i, top_p=p) for i in range(50) for p in (0.05, 0.5, 0.9, 0.9999)]
    out = step(sampler_of(rows, 2000), rows, logits)
    check_step(rows, logits, out)


def test_stop_tokens_are_masked_until_min_tokens():
    logits = torch.zeros(8, 10)
    logits[:, :2] = 50.0
    rows = [row_of(min_tokens=3, stop_token_ids=[1], outputs=tuple([5] * n), seed=n) for n in range(6)]
    out = step(sampler_of(rows, 10), rows, logits[:6])
    assert [token < 2 for token in out.token_ids_B.tolist()] == [False] * 3 + [True] * 3


def test_bad_words_are_never_completed_but_may_begin():
    logits = torch.full((1, 6), -50.0)
    logits[0, [3, 4, 5]] = 0.0
    rows = [row_of(bad_words=([3, 3, 4], [4, 4]))]
    sampler = sampler_of(rows, 6)
    for _ in range(300):
        rows[0].outputs.append(int(step(sampler, rows, logits).token_ids_B))
    text = "".join(map(str, rows[0].outputs))
    assert "334" not in text and "44" not in text and "43" in text and "34" in text and "33" in text and "54" in text


def test_prompt_logprobs_score_the_targets_and_rank_the_rest():
    logits = torch.randn(20, 300)
    targets = torch.arange(20)
    for temperature, mode, scale in ((0.5, "processed", 0.5), (0.5, "raw", 1.0), (0.0, "processed", 1.0)):
        logprobs, top_ids, tops = prompt_logprobs(logits, targets, 5, temperature, mode)
        expected = torch.log_softmax(logits / scale, 1)
        assert torch.allclose(logprobs, expected.gather(1, targets[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(tops, expected.topk(5).values, atol=1e-5) and torch.equal(top_ids, logits.topk(5).indices)
        alone = prompt_logprobs(logits[7:8], targets[7:8], 5, temperature, mode)
        assert torch.equal(alone[0], logprobs[7:8]) and torch.equal(alone[2], tops[7:8])
    assert prompt_logprobs(logits, targets, 0, 1.0, "raw")[1].shape == (20, 0)
    assert prompt_logprobs(logits[:, :3], targets % 3, 9, 1.0, "raw")[1].shape == (20, 3)
