"""Speculation changes nothing but the number of passes: tokens, logprobs and reasons are those of plain decoding."""

import random

import pytest
from model_checks import PROMPTS, make
from tiny_models import tiny_model

from batchgen import LLM, SamplingParams
from batchgen.config import EngineConfig
from batchgen.request import Request
from batchgen.sequence import Sequence
from batchgen.speculation import MOST_LIVE, TRY_AGAIN, Speculation

MODEL = "batchgen/assets/tiny-moe"
LOOPS = [[7, 8, 9, 10] * 6, [5, 6] * 9, random.Random(1).choices(range(200), k=30) * 2]
CASES = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.3, "seed": 3},
    "group": {"temperature": 0.5, "seed": 4, "n": 6},
    "stopped": {"temperature": 0, "stop_token_ids": [10, 6], "ignore_eos": False},
    "short": {"temperature": 0, "max_tokens": 3},
    "one": {"temperature": 0, "max_tokens": 1},
}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss", "deepseek_v32"])
def folder(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def always(monkeypatch) -> None:
    monkeypatch.setattr(Speculation, "_preferred", lambda self: True)


@pytest.mark.parametrize("case", CASES)
def test_samples_are_those_of_plain_decoding(folder, case, monkeypatch):
    always(monkeypatch)
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | CASES[case])
    plain = make(folder, deterministic=True).generate(LOOPS + PROMPTS[:2], params)
    llm = make(folder, deterministic=True, num_speculative_tokens=5)
    guessed = llm.generate(LOOPS + PROMPTS[:2], params)
    for got, want in zip(guessed, plain, strict=True):
        assert [s.token_ids for s in got.samples] == [s.token_ids for s in want.samples]
        assert [s.logprobs for s in got.samples] == [s.logprobs for s in want.samples]
        assert [(s.finish_reason, s.stop_match) for s in got.samples] == [(s.finish_reason, s.stop_match) for s in want.samples]
    stats = llm.engine.stats()
    assert stats.output_tokens == sum(len(s.token_ids) for g in guessed for s in g.samples)


def test_repeated_text_takes_fewer_passes(monkeypatch):
    always(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    steps = {}
    for num_tokens in (0, 7):
        llm = LLM(MODEL, dtype="float32", num_threads=1, num_speculative_tokens=num_tokens, decision_interval=8)
        llm.generate([[20, 21, 22, 23] * 8], params)
        steps[num_tokens] = llm.engine.stats()
    assert steps[7].drafted_tokens >= steps[7].accepted_tokens > 0
    assert steps[7].output_tokens == steps[0].output_tokens == 120


def test_strings_that_stop_are_found_inside_a_draft(monkeypatch):
    always(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=60, stop=["3", "7"], ignore_eos=True)
    prompts = [f"Calculate {i} * {i + 1}." for i in range(1, 6)]
    plain, guessed = (LLM(MODEL, num_threads=1, num_speculative_tokens=n).generate(prompts, params) for n in (0, 6))
    assert [g.samples[0].text for g in guessed] == [g.samples[0].text for g in plain]
    assert [g.samples[0].stop_match for g in guessed] == [g.samples[0].stop_match for g in plain]


def test_rows_that_ask_for_more_than_their_tokens_and_models_with_states_are_decoded_plainly(tmp_path, monkeypatch):
    always(monkeypatch)
    for params in ({"repetition_penalty": 1.3}, {"logprobs": 2}, {"return_routed_experts": True}, {"top_k": 3}):
        llm = LLM(MODEL, num_threads=1, num_speculative_tokens=6)
        llm.generate([[7, 8] * 10], SamplingParams(max_tokens=20, ignore_eos=True, **params))
        assert llm.engine.stats().drafted_tokens == 0
    llm = make(tiny_model("qwen3_next", tmp_path), num_speculative_tokens=6)
    llm.generate(LOOPS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert llm.engine.stats().drafted_tokens == 0


def sequence(prompt: list[int], output: list[int], index: int = 0, n: int = 1) -> Sequence:
    request = Request(
        request_id="r", prompt_token_ids=prompt, params=SamplingParams(n=n, max_tokens=99), sample_indices=[index], seed_base=0
    )
    seq = Sequence(
        id=index, request=request, index=index, seed=0, max_outputs=99, detail=None, num_cached=0, stop_token_ids=frozenset(), pages=[],
        prompt_keys=[], num_computed=0,
    )  # fmt: skip
    seq.output_ids = output
    return seq


def test_drafts_follow_the_longest_run_seen_in_the_prompt_the_output_or_the_group():
    speculation = Speculation(3)
    assert speculation.drafts([sequence([1, 2, 3, 4, 5, 1, 2, 3], [])]) == [[4, 5, 1]]
    assert Speculation(3).drafts([sequence([9, 1, 2, 50, 8, 1, 2, 60, 9], [1, 2])]) == [[50, 8, 1]]
    assert Speculation(3).drafts([sequence([1, 2, 3], [4])]) is None
    group = Speculation(4)
    group.learn(sequence([1], [10, 11, 12, 13, 14, 15], index=0, n=2))
    assert group.drafts([sequence([1], [11, 12], index=1, n=2)]) == [[13, 14, 15]]
    group.forget("r")
    assert group.drafts([sequence([1], [11, 12], index=1, n=2)]) is None


def test_drafts_leave_room_for_the_token_that_the_model_adds():
    seq = sequence([1, 2, 3, 1, 2, 3, 1, 2], [])
    seq.max_outputs = 2
    assert Speculation(5).drafts([seq]) == [[3]]


def test_it_is_off_with_many_sequences_and_while_it_does_not_pay():
    loop = sequence([1, 2] * 5, [])
    assert Speculation(4).drafts([loop] * (MOST_LIVE + 1)) is None and Speculation(0).drafts([loop]) is None
    slow = Speculation(4)
    slow.note(False, 16, 1.0)
    slow.note(True, 4, 1.0)
    tried = [slow.drafts([loop]) is not None for _ in range(2 * TRY_AGAIN)]
    assert tried.count(True) == 2
    fast = Speculation(4)
    fast.note(False, 16, 1.0)
    fast.note(True, 40, 1.0)
    tried = [fast.drafts([loop]) is not None for _ in range(2 * TRY_AGAIN)]
    assert tried.count(False) == 2


@pytest.mark.parametrize("value", [-1, 16, 1.5, True])
def test_a_wrong_number_of_tokens_is_refused(value):
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        EngineConfig(model=MODEL, num_speculative_tokens=value)
