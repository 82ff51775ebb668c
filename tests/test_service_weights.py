"""Weight updates through the real service, nodes and client, into fake engines."""

import asyncio

import pytest
import torch
from fake_engine import FakeEngine, Spec
from rollout_kit import QUICK, in_loop, node, running, until

from batchgen.errors import WeightUpdateError
from batchgen.sampling_params import SamplingParams

SPECS = {"a": Spec((64, 33), "float32"), "b": Spec((7,), "bfloat16")}


def engines(count: int, **options):
    made = [FakeEngine(specs=SPECS, **options) for _ in range(count)]
    return made, [lambda one=one: one for one in made]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 33), value), "b": torch.full((7,), value, dtype=torch.bfloat16)}


@in_loop
async def test_pushed_weights_reach_every_node_and_later_tokens_carry_the_version():
    made, factories = engines(2)
    async with running(*factories) as (one, client):
        report = await client.update_weights(tensors(2.0), version=5)
        assert report.version == 5 and len(report.nodes) == 2
        for engine in made:
            assert engine.weights_version == 5 and torch.equal(engine.weights.tensors["a"], tensors(2.0)["a"])
        groups = await client.generate([[k] for k in range(20)], SamplingParams(max_tokens=3))
        assert {span[0] for group in groups for span in group.samples[0].weights_versions} == {5}
        await until(lambda: client.weights_version == 5)
        assert one.health().weights_version == 5


@pytest.mark.parametrize("policy", ["finish", "abort", "continue"])
@in_loop
async def test_each_policy_treats_running_samples_as_it_says(policy):
    _, factories = engines(1, step_s=0.01, tokens_per_step=1)
    async with running(*factories) as (_, client):
        work = asyncio.create_task(client.generate([[1]], SamplingParams(n=2, max_tokens=60)))
        await asyncio.sleep(0.2)
        await client.update_weights(tensors(1.0), version=1, policy=policy)
        (group,) = await work
        for sample in group.samples:
            versions = [span[0] for span in sample.weights_versions]
            assert (sample.finish_reason, versions) == {
                "finish": ("length", [0]), "abort": ("abort", [0]), "continue": ("length", [0, 1]),
            }[policy]  # fmt: skip


@in_loop
async def test_finish_while_paused_with_running_samples_is_refused_at_once_and_the_other_policies_work():
    made, factories = engines(1, step_s=0.01, tokens_per_step=1)
    async with running(*factories) as (one, client):
        work = asyncio.create_task(client.generate([[1]], SamplingParams(n=2, max_tokens=60)))
        await until(lambda: one.health().nodes[0].outstanding == 2)
        await client.pause()
        started = asyncio.get_running_loop().time()
        with pytest.raises(
            WeightUpdateError, match=r"paused and 2 unfinished samples.*resume first, or push with policy continue"
        ) as refused:
            await client.update_weights(tensors(1.0), version=1)
        assert refused.value.code == "paused" and asyncio.get_running_loop().time() - started < 2
        assert made[0].weights_version == 0 and not one._coordinator.busy
        await client.update_weights(tensors(1.0), version=1, policy="continue")
        await client.resume()
        (group,) = await work
        assert {sample.finish_reason for sample in group.samples} == {"length"}
        await client.pause()
        await client.update_weights(tensors(2.0), version=2)  # nothing runs: nothing is held
        await client.resume()
        assert made[0].weights_version == 2


@in_loop
async def test_a_pause_while_finish_waits_ends_the_update_with_the_reason():
    made, factories = engines(1, step_s=0.01, tokens_per_step=1)
    async with running(*factories) as (one, client):
        work = asyncio.create_task(client.generate([[1]], SamplingParams(n=2, max_tokens=200)))
        await until(lambda: one.health().nodes[0].outstanding == 2)
        push = asyncio.create_task(client.update_weights(tensors(1.0), version=1))
        await until(lambda: one._holding)
        await client.pause()
        with pytest.raises(WeightUpdateError, match="paused") as refused:
            await push
        assert refused.value.code == "paused"
        await client.resume()
        (group,) = await work
        assert [sample.weights_versions for sample in group.samples] == [[(0, 0, 200)]] * 2 and made[0].weights_version == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": torch.zeros(3)}, "shape"),
        ({"surprise": torch.zeros(3)}, "surprise"),
        ({"b": torch.full((7,), float("nan"))}, "finite"),
    ],
)
@in_loop
async def test_wrong_weights_are_refused_and_the_next_push_works(change, match):
    made, factories = engines(2)
    async with running(*factories) as (_, client):
        with pytest.raises(WeightUpdateError, match=match):
            await client.update_weights(tensors(1.0) | change, version=1)
        assert [engine.weights_version for engine in made] == [0, 0]
        await client.update_weights(tensors(3.0), version=2)
        assert [engine.weights_version for engine in made] == [2, 2]


@in_loop
async def test_a_node_that_joins_late_with_old_weights_serves_after_the_next_push():
    made, factories = engines(1)
    async with running(*factories, limits=QUICK) as (one, client):
        await client.update_weights(tensors(1.0), version=1)
        late = FakeEngine(specs=SPECS)
        async with node(one, lambda: late, name="late"):
            await client.generate([[1]] * 8, SamplingParams(max_tokens=2))
            assert not late.submitted
            await client.update_weights(tensors(2.0), version=2)
            await until(lambda: all(each.serving for each in one.health().nodes))
            await client.generate([[k] for k in range(8)], SamplingParams(max_tokens=2))
            assert late.submitted and [late.weights_version, made[0].weights_version] == [2, 2]


@in_loop
async def test_after_losing_every_node_a_fresh_one_serves_again_after_a_push():
    async with running(lambda: FakeEngine(specs=SPECS), limits=QUICK) as (one, client):
        await client.update_weights(tensors(1.0), version=1)
        (old,) = one._nodes.nodes.values()
        one._nodes.lose(old, "test", "lost for the test")
        await until(lambda: one.health().nodes)
        async with node(one, lambda: FakeEngine(specs=SPECS), name="fresh"):
            await client.update_weights(tensors(2.0), version=2)
            groups = await client.generate([[1]], SamplingParams(max_tokens=2))
            assert groups[0].samples[0].weights_versions == [(2, 0, 2)]


@in_loop
async def test_generation_and_pushes_can_interleave_and_no_sample_mixes_versions_under_finish():
    _, factories = engines(2, step_s=0.002, tokens_per_step=4)
    async with running(*factories) as (_, client):
        work = [asyncio.create_task(client.generate([[k]] * 20, SamplingParams(n=2, max_tokens=16))) for k in range(6)]
        for version in range(1, 5):
            await client.update_weights(tensors(float(version)), version=version)
        for groups in await asyncio.gather(*work):
            for group in groups:
                assert all(len(sample.weights_versions) == 1 and len(sample.token_ids) == 16 for sample in group.samples)
