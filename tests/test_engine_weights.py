"""In-place weight updates seen from the engine: atomic, versioned, nothing of the old weights reused."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_moe

from batchgen import LLM, Engine, EngineConfig, SamplingParams
from batchgen.errors import WeightUpdateError
from batchgen.events import SampleFinished, WeightsCommitted
from batchgen.request import Request

OPTIONS = {"dtype": "float32", "kv_gb": 0.01, "max_model_len": 256, "num_threads": 1}
PROMPT = list(range(1, 40))
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tiny_moe(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]


def state(folder):
    return load_file(f"{folder}/model.safetensors")


def greedy(llm, params=GREEDY):
    return llm.generate([PROMPT], params)[0]


def running(folder, params=GREEDY, steps=2):
    eng = Engine(EngineConfig(model=str(folder), decision_interval=4, **OPTIONS))
    for i in range(3):
        indices = list(range(params.n))
        eng.submit(Request(request_id=str(i), prompt_token_ids=[*PROMPT, i], params=params, sample_indices=indices, seed_base=9))
    for _ in range(steps):
        eng.step()
    return eng


def stage(eng, folder, version=1):
    staged = eng.weights.open(version)
    for name, tensor in state(folder).items():
        staged.put(name, tensor)
    return staged


def drain(eng):
    events = []
    while eng.has_work:
        events += eng.step()
        eng.pool.check()
    return events


def samples(events):
    return {e.request_id: e.sample for e in events if isinstance(e, SampleFinished)}


def test_after_an_update_outputs_equal_a_fresh_engines_and_no_old_page_is_used(folders):
    llm = LLM(folders[0], **OPTIONS)
    old = greedy(llm)
    storages = [s.data_ptr() for s in llm.engine.weights.table.storages()]
    llm.update_weights(state(folders[1]), version=3)
    new, fresh = greedy(llm), greedy(LLM(folders[1], **OPTIONS))
    assert new.samples[0].token_ids == fresh.samples[0].token_ids != old.samples[0].token_ids
    assert new.samples[0].logprobs == fresh.samples[0].logprobs
    assert new.num_cached_tokens == 0 and greedy(llm).num_cached_tokens == 32
    assert new.samples[0].weights_versions == [(3, 0, 40)]
    assert [s.data_ptr() for s in llm.engine.weights.table.storages()] == storages


def test_the_same_weights_pushed_twice_change_nothing(folders):
    llm = LLM(folders[0], **OPTIONS)
    before = greedy(llm).samples[0]
    for version in (1, 2):
        llm.update_weights(state(folders[0]).items(), version=version)
        after = greedy(llm).samples[0]
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


@pytest.mark.parametrize("fault", ["missing", "shape", "nan", "unknown"])
def test_a_faulty_update_leaves_the_old_version_serving_and_the_next_one_works(folders, fault):
    llm = LLM(folders[0], **OPTIONS)
    before = greedy(llm).samples[0].token_ids
    tensors = state(folders[1])
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif fault == "nan":
        tensors[name] = tensors[name] * float("nan")
    else:
        tensors["model.layers.99.mystery"] = torch.zeros(2)
    with pytest.raises(WeightUpdateError, match="mystery" if fault == "unknown" else "experts.2.down_proj"):
        llm.update_weights(tensors, version=1)
    assert llm.engine.weights_version == 0
    assert greedy(llm).samples[0].token_ids == before
    llm.update_weights(state(folders[1]), version=1)
    assert llm.engine.weights_version == 1


def test_finish_lets_running_samples_end_under_the_old_weights(folders):
    eng = running(folders[0])
    eng.commit_weights(stage(eng, folders[1]), "finish")
    eng.submit(Request(request_id="late", prompt_token_ids=PROMPT, params=GREEDY, sample_indices=[0], seed_base=1))
    events = drain(eng)
    done = samples(events)
    assert all(done[str(i)].weights_versions == [(0, 0, 40)] for i in range(3))
    assert done["late"].weights_versions == [(1, 0, 40)]
    committed = [i for i, e in enumerate(events) if isinstance(e, WeightsCommitted)]
    assert len(committed) == 1 and events[committed[0]].version == 1
    fresh = greedy(LLM(folders[1], **OPTIONS))
    assert done["late"].token_ids == fresh.samples[0].token_ids


def test_abort_ends_running_samples_at_the_swap(folders):
    eng = running(folders[0])
    eng.commit_weights(stage(eng, folders[1]), "abort")
    done = samples(drain(eng))
    assert {s.finish_reason for s in done.values()} == {"abort"}
    assert all(0 < len(s.token_ids) < 40 and s.weights_versions == [(0, 0, len(s.token_ids))] for s in done.values())
    assert eng.weights_version == 1 and eng.pool.num_used == 0


def test_continue_keeps_the_tokens_and_goes_on_under_the_new_weights(folders):
    eng = running(folders[0])
    had = {seq.request.request_id: list(seq.output_ids) for seq in eng.runtime.sequences()}
    eng.commit_weights(stage(eng, folders[1]), "continue")
    done = samples(drain(eng))
    for request_id, tokens in had.items():
        sample, count = done[request_id], len(tokens)
        assert 0 < count < 40 and sample.token_ids[:count] == tokens
        assert sample.weights_versions == [(0, 0, count), (1, count, 40)]
        rest = LLM(folders[1], **OPTIONS).generate(
            [[*PROMPT, int(request_id), *tokens]], SamplingParams(temperature=0, max_tokens=40 - count, ignore_eos=True)
        )
        assert sample.token_ids[count:] == rest[0].samples[0].token_ids


def test_a_second_update_is_refused_while_one_waits(folders):
    eng = running(folders[0])
    first = stage(eng, folders[1], version=1)
    eng.commit_weights(first, "finish")
    with pytest.raises(WeightUpdateError):
        eng.weights.open(2)
    assert eng.cancel_commit() is first
    first.discard()
    assert {s.weights_versions[0][0] for s in samples(drain(eng)).values()} == {0}
    eng.commit_weights(stage(eng, folders[1], version=2), "finish")
    drain(eng)
    assert eng.weights_version == 2


def test_versions_only_grow(folders):
    llm = LLM(folders[0], **OPTIONS)
    llm.update_weights(state(folders[1]), version=5)
    with pytest.raises(WeightUpdateError, match="5"):
        llm.update_weights(state(folders[0]), version=5)


def test_an_update_that_a_pause_would_hold_for_ever_is_refused_and_the_next_one_works(folders):
    llm = LLM(folders[0], decision_interval=4, **OPTIONS)
    llm.engine.submit(Request(request_id="held", prompt_token_ids=PROMPT, params=GREEDY, sample_indices=[0], seed_base=9))
    while not llm.engine.stats().running:
        llm.engine.step()
    llm.engine.pause()
    with pytest.raises(WeightUpdateError, match="resume") as refused:
        llm.update_weights(state(folders[1]), version=1)
    assert refused.value.code == "paused"
    assert llm.engine.weights_version == 0
    llm.update_weights(state(folders[1]), version=1, policy="continue")
    llm.engine.resume()
    assert samples(drain(llm.engine))["held"].weights_versions[-1][0] == 1
