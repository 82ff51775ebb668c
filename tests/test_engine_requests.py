"""Requests that cannot be served, limits, stops, aborts and broken logits: the row concerned is told, the others go on."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_moe

from batchgen import LLM, Engine, EngineConfig, RequestError, SamplingParams
from batchgen.errors import MemoryPlanError, ModelError
from batchgen.events import SampleFinished, SampleProgress
from batchgen.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, dtype="float32", kv_gb=0.01, max_model_len=128, num_threads=1)


def engine(folder, **options):
    return Engine(EngineConfig(model=str(folder), **{"dtype": "float32", "kv_gb": 0.01, "max_model_len": 128, "num_threads": 1, **options}))


def request(request_id, ids, params, **extra):
    indices = list(range(params.n))
    return Request(request_id=request_id, prompt_token_ids=ids, params=params, sample_indices=indices, seed_base=1, **extra)


def drain(engine):
    events = []
    while engine.has_work:
        events += engine.step()
        engine.pool.check()
    return events


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "empty_prompt"),
        ([5, 10**6], "token_id_out_of_range"),
        ([5, -1], "token_id_out_of_range"),
        ([5, 1 << 63], "token_id_out_of_range"),
        ([1] * 128, "prompt_too_long"),
        ([1] * 5000, "prompt_too_long"),
    ],
)
def test_a_bad_prompt_is_one_error_row_and_the_others_finish(llm, prompt, code):
    good = [3, 4, 5]
    alone = llm.generate([good], GREEDY)[0].samples[0].token_ids
    before, bad, after = llm.generate([good, prompt, good], GREEDY)
    assert before.samples[0].token_ids == after.samples[0].token_ids == alone
    assert [s.finish_reason for s in bad.samples] == ["error"]
    assert bad.samples[0].error.code == code
    assert bad.samples[0].token_ids == bad.samples[0].logprobs == []


@pytest.mark.parametrize(
    ("params", "code"),
    [
        (SamplingParams(logit_bias={10**6: 1.0}), "token_id_out_of_range"),
        (SamplingParams(allowed_token_ids=[10**6]), "token_id_out_of_range"),
        (SamplingParams(stop_token_ids=[10**6]), "token_id_out_of_range"),
    ],
)
def test_token_ids_outside_the_vocabulary_in_parameters_are_typed_row_errors(llm, params, code):
    bad, good = llm.generate([[1, 2], [1, 2]], [params, GREEDY])
    assert bad.samples[0].finish_reason == "error" and code in (bad.samples[0].error.code, "token_id_out_of_range")
    assert good.samples[0].finish_reason == "length"


def test_a_prompt_one_short_of_the_context_yields_one_token(llm):
    (group,) = llm.generate([[1] * 127], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(group.samples[0].token_ids) == 1
    assert group.samples[0].finish_reason == "length"
    assert "clamped to 1" in group.samples[0].detail


def test_max_tokens_over_the_context_runs_to_the_limit_and_says_why(llm):
    (group,) = llm.generate([[1] * 100], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert len(group.samples[0].token_ids) == 28
    assert group.samples[0].finish_reason == "length"
    assert "clamped to 28" in group.samples[0].detail


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17])
def test_exactly_max_tokens_come_out(llm, count, prompt_len):
    (group,) = llm.generate([[7] * prompt_len], SamplingParams(max_tokens=count, ignore_eos=True, n=2, logprobs=2))
    for sample in group.samples:
        assert len(sample.token_ids) == len(sample.logprobs) == len(sample.top_logprobs) == count
        assert sample.weights_versions == [(0, 0, count)]


def test_a_stop_token_ends_the_sample_and_is_kept_with_its_logprob(llm):
    ids = llm.generate([[3, 4, 5]], GREEDY)[0].samples[0].token_ids
    stop = ids[3]
    first = ids.index(stop)
    (group,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=6, stop_token_ids=[stop]))
    sample = group.samples[0]
    assert sample.token_ids == ids[: first + 1] and len(sample.logprobs) == first + 1
    assert (sample.finish_reason, sample.stop_match) == ("stop", stop)


def test_temperatures_zero_tiny_and_one_share_a_batch(llm):
    cases = [SamplingParams(temperature=t, max_tokens=8, ignore_eos=True, seed=3) for t in (0.0, 1e-6, 1.0)]
    groups = llm.generate([[9, 8, 7]] * 3, cases)
    assert groups[0].samples[0].token_ids == groups[1].samples[0].token_ids
    for group in groups:
        assert torch.isfinite(torch.tensor(group.samples[0].logprobs)).all()


@pytest.mark.parametrize("top_p", [0.0, 1e-8])
def test_a_vanishing_top_p_keeps_the_top_token(llm, top_p):
    greedy = llm.generate([[9, 8, 7]], GREEDY)[0].samples[0].token_ids
    assert llm.generate([[9, 8, 7]], SamplingParams(top_p=top_p, max_tokens=6, ignore_eos=True))[0].samples[0].token_ids == greedy


def test_nan_logits_end_their_own_sample_in_error(folder):
    eng = engine(folder)
    eng._runner.model.embedding_VD[77] = float("nan")
    eng.submit(request("bad", [77, 1, 2], SamplingParams(max_tokens=4, n=2, ignore_eos=True)))
    eng.submit(request("good", [1, 2, 3], SamplingParams(max_tokens=4, n=2, ignore_eos=True, allowed_token_ids=[1, 2, 3])))
    finished = {(e.request_id, e.sample.index): e.sample for e in drain(eng) if isinstance(e, SampleFinished)}
    assert len(finished) == 4
    for (name, _), sample in finished.items():
        if name == "bad":
            assert sample.finish_reason == "error" and sample.error.code == "nan_logits"
        else:
            assert sample.finish_reason == "length" and len(sample.token_ids) == 4


def test_seed_reproduces_a_set_of_different_samples(llm):
    params = SamplingParams(n=8, max_tokens=12, seed=5, ignore_eos=True)
    once, again = llm.generate([[1, 2, 3]], params)[0], llm.generate([[1, 2, 3]], params)[0]
    assert [s.token_ids for s in once.samples] == [s.token_ids for s in again.samples]
    assert len({tuple(s.token_ids) for s in once.samples}) == 8


def test_without_a_seed_a_second_call_draws_new_samples_and_a_new_llm_the_same(folder, llm):
    def fresh():
        return LLM(folder, dtype="float32", kv_gb=0.01, max_model_len=128, num_threads=1, seed=11)

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    one = fresh()
    first, second = one.generate([[1, 2, 3]], params), one.generate([[1, 2, 3]], params)
    assert first[0].samples[0].token_ids != second[0].samples[0].token_ids
    assert fresh().generate([[1, 2, 3]], params)[0].samples[0].token_ids == first[0].samples[0].token_ids


def test_abort_ends_running_and_waiting_samples_once(folder):
    eng = engine(folder, max_num_seqs=2)
    eng.submit(request("a", [1, 2, 3], SamplingParams(n=5, max_tokens=100, ignore_eos=True)))
    eng.submit(request("b", [1, 2, 3, 4], SamplingParams(n=1, max_tokens=100, ignore_eos=True)))
    for _ in range(3):
        eng.step()
    eng.abort("a", [0, 4])
    eng.abort("nobody")
    events = drain(eng)
    done = {(e.request_id, e.sample.index): e.sample for e in events if isinstance(e, SampleFinished)}
    assert len(done) == len([e for e in events if isinstance(e, SampleFinished)]) == 6
    assert {key for key, sample in done.items() if sample.finish_reason == "abort"} == {("a", 0), ("a", 4)}
    assert done["a", 4].token_ids == [] and 0 < len(done["a", 0].token_ids) < 100
    assert eng.pool.num_used == 0


def test_abort_all_empties_the_engine(folder):
    eng = engine(folder)
    for i in range(5):
        eng.submit(request(str(i), [i + 1] * 20, SamplingParams(n=3, max_tokens=90, ignore_eos=True)))
    eng.step()
    eng.abort_all()
    events = drain(eng)
    assert sum(isinstance(e, SampleFinished) and e.sample.finish_reason == "abort" for e in events) == 15
    assert eng.pool.num_used == 0 and not eng.has_work


def test_pause_keeps_everything_in_place(folder):
    eng = engine(folder)
    eng.submit(request("a", [1, 2, 3], GREEDY))
    eng.pause()
    assert eng.step() == [] and not eng.has_work
    eng.resume()
    assert eng.has_work and len(drain(eng)) == 1


def test_a_running_request_id_cannot_be_used_again_until_it_ended(folder):
    eng = engine(folder)
    eng.submit(request("a", [1, 2, 3], GREEDY))
    with pytest.raises(RequestError, match="still running") as caught:
        eng.submit(request("a", [1, 2], GREEDY))
    assert caught.value.code == "duplicate_request_id"
    drain(eng)
    eng.submit(request("a", [1, 2], GREEDY))
    assert len(drain(eng)) == 1


def test_streamed_pieces_add_up_to_the_sample(folder):
    eng = engine(folder, decision_interval=3)
    eng.submit(request("a", [1, 2, 3], SamplingParams(n=3, max_tokens=20, ignore_eos=True), stream=True))
    events = drain(eng)
    for final in [e.sample for e in events if isinstance(e, SampleFinished)]:
        pieces = [e for e in events if isinstance(e, SampleProgress) and e.index == final.index]
        assert len(pieces) > 3
        assert [t for p in pieces for t in p.token_ids] == final.token_ids
        assert [x for p in pieces for x in p.logprobs] == final.logprobs
        assert "".join(p.text for p in pieces) == final.text


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_sample_ends_once_and_no_page_leaks_under_random_walks(folder, data):
    eng = engine(
        folder, kv_gb=data.draw(st.sampled_from([0.0006, 0.002])), max_num_seqs=data.draw(st.integers(1, 6)), max_num_batched_tokens=24
    )
    expected, seen = set(), []
    for i in range(data.draw(st.integers(5, 20))):
        action = data.draw(st.integers(0, 9))
        if action <= 4:
            n = data.draw(st.integers(1, 4))
            ids = [data.draw(st.integers(0, 3))] * data.draw(st.integers(1, 40))
            params = SamplingParams(
                n=n, max_tokens=data.draw(st.integers(1, 40)), prompt_logprobs=data.draw(st.sampled_from([None, None, 1]))
            )
            eng.submit(request(str(i), ids, params))
            expected |= {(str(i), j) for j in range(n)}
        elif action == 5:
            eng.abort(str(data.draw(st.integers(0, i))))
        elif action == 6 and eng.runtime.decoding:
            seqs = list(eng.runtime.decoding.values())
            eng._yield(seqs[data.draw(st.integers(0, len(seqs) - 1))])
        else:
            seen += eng.step()
        eng.pool.check()
    seen += drain(eng)
    ended = [(e.request_id, e.sample.index) for e in seen if isinstance(e, SampleFinished)]
    assert len(ended) == len(set(ended)) and set(ended) == expected
    assert eng.pool.num_used == 0
    assert len(eng._runner.slots.free) == eng.config.max_num_seqs


def test_a_budget_too_small_is_refused_with_the_numbers(folder):
    with pytest.raises(MemoryPlanError, match="give at least"):
        engine(folder, kv_gb=1e-6)
    with pytest.raises(MemoryPlanError, match="weights take"):
        engine(folder, kv_gb=None, device_memory_gb=1e-5)
    with pytest.raises(MemoryPlanError, match="no room for a prompt and an answer"):
        engine(folder, max_model_len=1)
    with pytest.raises(MemoryPlanError, match="over the model's own limit"):
        engine(folder, max_model_len=10**7)


def test_more_than_the_machine_has_is_refused(folder, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16}.__getitem__)
    with pytest.raises(MemoryPlanError, match=r"needs .* GB .*, this machine has 0.000 GB; lower kv_gb"):
        engine(folder)


@pytest.mark.parametrize("decision_interval", [100, 10**9])
def test_a_long_interval_does_not_keep_a_sample_from_starting(folder, decision_interval):
    page_bytes = engine(folder).memory.kv_bytes / engine(folder).memory.num_pages
    eng = engine(folder, kv_gb=4.5 * page_bytes / 1e9, decision_interval=decision_interval)
    eng.submit(Request(request_id="a", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=3), sample_indices=[0], seed_base=1))
    events = [event for _ in range(20) for event in eng.step()]
    assert any(isinstance(event, SampleFinished) for event in events)


def test_a_missing_folder_is_a_clear_error(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        engine(tmp_path / "nowhere")


def test_ids_that_the_tokenizer_does_not_know_are_delivered_and_spell_nothing(tmp_path):
    llm = LLM(tiny_moe(tmp_path, tokenizer=True), dtype="float32", kv_gb=0.01, num_threads=1)
    assert llm.engine.facts.vocab_size == 257
    assert llm.generate([[1, 257]])[0].samples[0].error.code == "token_id_out_of_range"
    groups = llm.generate([[i % 250] * 3 for i in range(64)], SamplingParams(n=4, max_tokens=16, ignore_eos=True, stop=["zq"]))
    samples = [sample for group in groups for sample in group.samples]
    assert any(token >= 257 for sample in samples for token in sample.token_ids)
    assert all(sample.finish_reason in ("length", "stop") for sample in samples)


def test_the_text_of_a_stop_token_is_hidden_unless_asked_for(tmp_path):
    llm = LLM(tiny_moe(tmp_path, tokenizer=True), dtype="float32", kv_gb=0.01, num_threads=1)
    base = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "allowed_token_ids": list(range(97, 123))}
    ids = llm.generate([[5, 6]], SamplingParams(**base))[0].samples[0].token_ids
    stop, count = ids[2], ids.index(ids[2]) + 1
    for extra in ({}, {"stop": ["\n"]}):
        params = [SamplingParams(**base, **extra, stop_token_ids=[stop], include_stop=include) for include in (False, True)]
        hidden, shown = llm.generate([[5, 6]] * 2, params)
        assert hidden.samples[0].token_ids == shown.samples[0].token_ids == ids[:count]
        assert hidden.samples[0].text == bytes(ids[: count - 1]).decode()
        assert shown.samples[0].text == bytes(ids[:count]).decode()
