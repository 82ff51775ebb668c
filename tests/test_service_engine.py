"""The real engine behind the real service: the same results as without it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from rollout_kit import in_loop, node, running, service
from tiny_models import tiny_moe

from batchgen import LLM, EngineConfig, SamplingParams
from rollout.client import AsyncRolloutClient
from rollout.node_main import engine_factory

OPTIONS = {"dtype": "float32", "kv_gb": 0.01, "num_threads": 1, "max_num_seqs": 16, "deterministic": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model") / "tiny", vocab_size=257, tokenizer=True)


def factory(model: Path):
    return engine_factory(EngineConfig(model=str(model), **OPTIONS))


PROMPTS = [[1, 2, 3], "some text", [7] * 40, [], [300], [5]]
PARAMS = [
    SamplingParams(n=3, max_tokens=12, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=1),
    SamplingParams(n=2, max_tokens=20, top_p=0.9, return_routed_experts=True),
    SamplingParams(n=2),
    SamplingParams(),
    SamplingParams(max_tokens=6, stop=["a"], seed=11),
]


@in_loop
async def test_the_service_returns_what_the_engine_alone_returns_whatever_the_number_of_nodes(model):
    alone = LLM(str(model), seed=1, **OPTIONS).generate(PROMPTS, PARAMS)
    async with running(factory(model), factory(model)) as (_, client):
        served = await client.generate(PROMPTS, PARAMS)
    for ours, theirs in zip(served, alone, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert (ours.logprobs_mode, len(ours.samples)) == (theirs.logprobs_mode, len(theirs.samples))
        if theirs.prompt_logprobs is not None:
            assert ours.prompt_logprobs[0] is None
            np.testing.assert_allclose(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], atol=1e-6)
        for one, other in zip(ours.samples, theirs.samples, strict=True):
            assert (one.token_ids, one.text, one.seed) == (other.token_ids, other.text, other.seed)
            assert (one.finish_reason, one.stop_match, one.weights_versions) == (
                other.finish_reason,
                other.stop_match,
                other.weights_versions,
            )
            np.testing.assert_array_equal(np.float32(one.logprobs), np.float32(other.logprobs))
            assert (one.error and one.error.code) == (other.error and other.error.code)
            assert (one.top_logprobs is None) == (other.top_logprobs is None)
            if other.routed_experts is not None:
                np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


@in_loop
async def test_weights_pushed_through_the_service_change_what_the_engine_says(model):
    from safetensors.torch import load_file

    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    changed = {name: tensor.roll(1, 0) if name.endswith("embed_tokens.weight") else tensor for name, tensor in tensors.items()}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    async with service() as one, node(one, factory(model)), AsyncRolloutClient(one.url) as client:
        (before,) = await client.generate([[1, 2, 3]], params)
        await client.update_weights(changed, version=1)
        (middle,) = await client.generate([[1, 2, 3]], params)
        await client.update_weights(tensors, version=2)
        (after,) = await client.generate([[1, 2, 3]], params)
    assert middle.num_cached_tokens == after.num_cached_tokens == 0
    assert before.samples[0].token_ids == after.samples[0].token_ids != middle.samples[0].token_ids
    assert [g.samples[0].weights_versions for g in (before, middle, after)] == [[(v, 0, 12)] for v in range(3)]


@in_loop
async def test_an_update_in_the_middle_is_covered_exactly_by_the_spans(model):
    from safetensors.torch import load_file

    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    async with service() as one, node(one, factory(model)), AsyncRolloutClient(one.url) as client:
        work = asyncio.create_task(client.generate([[1, 2, 3]], SamplingParams(n=8, max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(0.1)
        await client.update_weights(tensors, version=1, policy="continue")
        (group,) = await work
    for sample in group.samples:
        ends = [end for _, _, end in sample.weights_versions]
        starts = [start for _, start, _ in sample.weights_versions]
        assert starts == [0, *ends[:-1]] and ends[-1] == len(sample.token_ids) == 100
