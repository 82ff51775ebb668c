"""The engine against transformers, and against itself under every way of cutting the work."""

import random

import pytest
import torch
from tiny_models import tiny_moe
from transformers import AutoModelForCausalLM

from batchgen import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("model"), seed=0, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(count, vocab=200, seed=0, low=3, high=60):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(low, high))] for _ in range(count)]


def make(folder, **options):
    return LLM(folder, **{"dtype": "float32", "kv_gb": 0.01, "num_threads": 1, **options})


def reference_logits(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].float()


def tokens(groups):
    return [[s.token_ids for s in g.samples] for g in groups]


def test_greedy_tokens_equal_transformers(folder, reference):
    batch = prompts(8)
    groups = make(folder).generate(batch, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for ids, group in zip(batch, groups, strict=True):
        with torch.no_grad():
            out = reference.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False, max_new_tokens=24,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert group.samples[0].token_ids == out[0, len(ids) :].tolist()
        assert group.samples[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.5])
def test_logprobs_equal_transformers_on_the_same_tokens(folder, reference, mode, temperature):
    batch = prompts(4, seed=1)
    params = SamplingParams(n=2, temperature=temperature, max_tokens=12, ignore_eos=True, logprobs=3, logprobs_mode=mode, top_p=0.9)
    for group in make(folder).generate(batch, params):
        assert group.logprobs_mode == mode
        for sample in group.samples:
            logits = reference_logits(reference, group.prompt_token_ids + sample.token_ids)[len(group.prompt_token_ids) - 1 : -1]
            want = (logits / (temperature if mode == "processed" and temperature else 1.0)).log_softmax(-1)
            got = torch.tensor(sample.logprobs)
            assert torch.allclose(got, want.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0], atol=1e-4)
            values, ids = want.topk(3)
            assert [list(top) for top in sample.top_logprobs] == ids.tolist()
            assert torch.allclose(torch.tensor([list(top.values()) for top in sample.top_logprobs]), values, atol=1e-4)


def test_prompt_logprobs_equal_transformers(folder, reference):
    (group,) = make(folder).generate([prompts(1, low=300, high=300)[0]], SamplingParams(prompt_logprobs=2, max_tokens=1, n=3))
    ids = group.prompt_token_ids
    want = reference_logits(reference, ids).log_softmax(-1)[:-1]
    assert group.prompt_logprobs[0] is None and group.prompt_top_logprobs[0] == {}
    assert len(group.prompt_logprobs) == len(group.prompt_top_logprobs) == len(ids)
    assert torch.allclose(torch.tensor(group.prompt_logprobs[1:]), want.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4)
    assert [list(top) for top in group.prompt_top_logprobs[1:]] == want.topk(2).indices.tolist()


def test_routed_experts_equal_the_reference_router(folder, reference):
    batch = prompts(3, seed=4)
    params = SamplingParams(n=2, max_tokens=9, ignore_eos=True, return_routed_experts=True)
    for options in ({}, {"max_num_batched_tokens": 17}, {"max_num_seqs": 2}):
        for group in make(folder, **options).generate(batch, params):
            for sample in group.samples:
                ids = group.prompt_token_ids + sample.token_ids
                with torch.no_grad():
                    router = reference(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
                k = reference.config.num_experts_per_tok
                want = torch.stack([layer.topk(k).indices for layer in router], 1)
                assert sample.routed_experts.shape == tuple(want.shape)
                assert (torch.from_numpy(sample.routed_experts).sort(-1).values == want.sort(-1).values).all()


CUTS = [
    {"max_num_batched_tokens": 16},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "decision_interval": 1},
    {"page_size": 4, "decision_interval": 5},
    {"kv_gb": 30 * 16 * 2 * 2 * 2 * 16 * 4 / 1e9, "decision_interval": 3},
]


@pytest.mark.parametrize("options", CUTS, ids=["chunked", "single", "few", "small-pages", "preempted"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_results_do_not_depend_on_how_the_work_is_cut(folder, options, deterministic):
    batch = prompts(12, seed=2)
    params = SamplingParams(n=3, max_tokens=30, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True, frequency_penalty=0.2)
    base = make(folder, deterministic=deterministic).generate(batch, params)
    order = list(range(len(batch)))
    random.Random(3).shuffle(order)
    llm = make(folder, deterministic=deterministic, **options)
    cut = llm.generate([batch[i] for i in order], params)
    if "kv_gb" in options:
        assert llm.engine.stats().preemptions > 0
    for i, group in zip(order, cut, strict=True):
        for mine, theirs in zip(group.samples, base[i].samples, strict=True):
            if deterministic:
                assert mine.token_ids == theirs.token_ids
                assert mine.logprobs == theirs.logprobs
            elif mine.token_ids == theirs.token_ids:
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    if not deterministic:
        same = sum(a == b for a, b in zip(tokens(cut), [tokens(base)[i] for i in order], strict=True))
        assert same >= len(batch) - 1  # a rounding difference may flip a draw that falls on the edge between two tokens
    llm.engine.pool.check()
    assert llm.engine.pool.num_used == 0


def test_a_group_prefills_its_prompt_once_and_its_samples_differ(folder):
    llm = make(folder, max_num_seqs=32, kv_gb=0.05)
    prompt = prompts(1, low=512, high=512)[0]
    (group,) = llm.generate([prompt], SamplingParams(n=16, max_tokens=16, ignore_eos=True))
    assert llm.engine.stats().prefill_tokens == 512
    assert len({tuple(s.token_ids) for s in group.samples}) == 16
    assert len({s.seed for s in group.samples}) == 16


def test_equal_prompts_and_equal_prefixes_share_pages(folder):
    llm = make(folder, kv_gb=0.05)
    prompt = prompts(1, low=64, high=64)[0]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.generate([prompt] * 5, params)
    assert llm.engine.stats().prefill_tokens == 64
    (group,) = llm.generate([[*prompt[:40], 1, 2, 3]], params)
    assert group.num_cached_tokens == 32
    assert llm.engine.stats().prefill_tokens == 64 + 11


def test_a_group_larger_than_the_batch_prefills_once(folder):
    llm = make(folder, max_num_seqs=4)
    prompt = prompts(1, low=33, high=33)[0]
    (group,) = llm.generate([prompt], SamplingParams(n=19, max_tokens=5, ignore_eos=True))
    assert llm.engine.stats().prefill_tokens == 33
    assert len({tuple(s.token_ids) for s in group.samples}) > 15


def test_bfloat16_agrees_with_its_own_weights_in_float32_within_rounding(folder):
    batch = prompts(4, seed=5)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    for group in make(folder, dtype="bfloat16").generate(batch, SamplingParams(max_tokens=8, ignore_eos=True)):
        sample = group.samples[0]
        logits = reference_logits(reference, group.prompt_token_ids + sample.token_ids)[len(group.prompt_token_ids) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sample.logprobs), want, atol=0.15)
