"""The service with fake engines: what users of the client rely on."""

import asyncio

import msgspec
import pytest
from fake_engine import VOCAB, FakeEngine, fake_tokens
from rollout_kit import QUICK, RawPeer, in_loop, node, running, service, until
from typer.testing import CliRunner

from batchgen.request import sample_seed, seed_base
from batchgen.sampling_params import SamplingParams
from rollout import wire
from rollout.batches import encode_ids
from rollout.cli import app
from rollout.client import AsyncRolloutClient
from rollout.errors import ConnectError, DeadlineError
from rollout.limits import ServiceLimits
from rollout.results import Finished, Progress


def slow(**options):
    """Engines of one token per step, 10 ms each."""
    return lambda: FakeEngine(**({"step_s": 0.01, "tokens_per_step": 1} | options))


@in_loop
async def test_groups_come_back_in_order_with_the_samples_of_their_prompt():
    async with running() as (_, client):
        params = [SamplingParams(n=1 + k % 3, max_tokens=1 + k % 5) for k in range(50)]
        groups = await client.generate([[k, k + 1] for k in range(50)], params)
        for k, group in enumerate(groups):
            assert group.prompt_token_ids == [k, k + 1] and [s.index for s in group.samples] == list(range(1 + k % 3))
            base = seed_base(1, str(k), params[k])
            for one in group.samples:
                assert one.seed == sample_seed(base, one.index)
                assert one.token_ids == fake_tokens(one.seed, 1 + k % 5) and len(one.logprobs) == 1 + k % 5
                assert (one.finish_reason, one.weights_versions) == ("length", [(0, 0, 1 + k % 5)])


@in_loop
async def test_text_and_chat_prompts_are_tokenised_at_the_node_and_their_ids_returned():
    async with running() as (_, client):
        ids, text, chat = await client.generate([[1], "hi", [{"role": "user", "content": "x"}]], SamplingParams(max_tokens=2))
        assert ids.prompt_token_ids == [1]
        assert text.prompt_token_ids == list(b"hi")
        assert chat.prompt_token_ids == list(b"<user>x")


@in_loop
async def test_everything_a_sample_carries_reaches_the_client():
    async with running() as (_, client):
        params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, return_routed_experts=True, logprobs_mode="raw")
        (group,) = await client.generate([[4, 5]], params)
        assert (group.logprobs_mode, group.prompt_logprobs, group.prompt_top_logprobs) == ("raw", [None, -5.0], [{}, {5: -0.5}])
        (one,) = group.samples
        assert one.top_logprobs == [{token: -0.25, (token + 1) % VOCAB: -2.0} for token in one.token_ids]
        assert one.routed_experts.shape == (4, 2, 2)


@pytest.mark.parametrize("bad", [[], [VOCAB], [-1], [1.5], "x" * (4 * 1024 * 1024 + 1), [{"role": "user"}]])
@in_loop
async def test_one_bad_row_is_one_error_row_and_the_others_finish(bad):
    async with running() as (_, client):
        good, failed, also_good = await client.generate([[1], bad, [2]], SamplingParams(n=2, max_tokens=4))
        assert [s.finish_reason for s in good.samples + also_good.samples] == ["length"] * 4
        assert [s.finish_reason for s in failed.samples] == ["error"] * 2 and all(s.error.message for s in failed.samples)


@in_loop
async def test_text_for_a_model_without_tokenizer_is_an_error_row():
    def bare() -> FakeEngine:
        engine = FakeEngine()
        engine.tokenizer = None
        return engine

    async with running(bare) as (_, client):
        text, ids = await client.generate(["hi", [1]], SamplingParams(max_tokens=2))
        assert text.samples[0].error.code == "no_tokenizer" and ids.samples[0].finish_reason == "length"


@in_loop
async def test_a_stream_gives_every_token_before_its_sample():
    async with running(slow()) as (_, client):
        got: dict[tuple[int, int], list[int]] = {}
        groups = {}
        async for event in client.stream([[1], [2]], SamplingParams(n=2, max_tokens=5)):
            if isinstance(event, Progress):
                tokens = got.setdefault((event.prompt_index, event.index), [])
                assert event.start == len(tokens)
                tokens += event.token_ids
            else:
                assert got[(event.prompt_index, event.sample.index)] == event.sample.token_ids
                if event.group:
                    groups[event.prompt_index] = event.group
        assert sorted(groups) == [0, 1] and len(got) == 4


@in_loop
async def test_leaving_a_stream_cancels_the_rest():
    async with running(slow()) as (one, client):
        events = client.stream([[1]] * 8, SamplingParams(max_tokens=4000))
        async for event in events:
            assert isinstance(event, Progress)
            break
        await events.aclose()
        await until(lambda: one.stats().open_requests == 0)


@in_loop
async def test_a_submitted_prompt_can_be_awaited_and_cancelled():
    async with running(slow()) as (one, client):
        handle, doomed = await client.submit([1], SamplingParams(max_tokens=3)), await client.submit([2], SamplingParams(max_tokens=4000))
        assert (await handle.result(5)).samples[0].finish_reason == "length" and handle.done()
        with pytest.raises(DeadlineError):
            await doomed.result(0.05)
        doomed.cancel()
        (sample,) = (await doomed.result(5)).samples
        assert sample.finish_reason == "abort" and sample.token_ids == fake_tokens(sample.seed, len(sample.token_ids))
        assert one.stats().open_requests == 0


@in_loop
async def test_a_batch_over_its_time_raises_and_is_cancelled():
    async with running(slow()) as (one, client):
        with pytest.raises(DeadlineError):
            await client.generate([[1]] * 4, SamplingParams(max_tokens=4000), timeout_s=0.2)
        await until(lambda: one.stats().open_requests == 0)
        await until(lambda: not one.health().nodes[0].outstanding)


@in_loop
async def test_a_row_over_its_deadline_is_an_error_row():
    async with running(slow(), request_timeout_s=0.3) as (_, client):
        slow_row, quick_row = await client.generate([[1], [2]], [SamplingParams(max_tokens=4000), SamplingParams(max_tokens=2)])
        assert slow_row.samples[0].error.code == "deadline" and slow_row.samples[0].error.retryable
        assert quick_row.samples[0].finish_reason == "length"


@in_loop
async def test_two_nodes_share_the_work_and_the_result_does_not_depend_on_it():
    params, prompts = SamplingParams(n=4, max_tokens=8), [[k] for k in range(40)]
    async with running(slow(), slow()) as (one, client):
        shared = await client.generate(prompts, params)
        assert all(each.engine is None or each.engine.output_tokens for each in one.health().nodes)
        assert len(one.health().nodes) == 2
    async with running() as (_, client):
        alone = await client.generate(prompts, params)
    assert [g.samples for g in shared] == [g.samples for g in alone]


@in_loop
async def test_a_group_stays_on_one_node_while_other_groups_wait():
    engines = []

    def factory() -> FakeEngine:
        engines.append(FakeEngine(step_s=0.01, tokens_per_step=1))
        return engines[-1]

    async with running(factory, factory) as (_, client):
        await client.generate([[k] for k in range(20)], SamplingParams(n=16, max_tokens=3))
    sizes = [len(request.sample_indices) for engine in engines for request in engine.submitted]
    assert sizes.count(16) >= 18 and all(engine.submitted for engine in engines)


@in_loop
async def test_pause_stops_tokens_and_resume_goes_on_and_the_pause_is_visible():
    async with running(slow()) as (_, client):
        await client.pause()
        handle = await client.submit([1], SamplingParams(max_tokens=3))
        with pytest.raises(DeadlineError):
            await handle.result(0.2)
        health = await client.health()
        assert health.status == "paused" and health.paused_s is not None and health.paused_s >= 0.2
        await client.resume()
        assert (await handle.result(5)).samples[0].finish_reason == "length"
        assert (await client.health()).status == "ok"


@in_loop
async def test_a_node_that_joins_a_paused_service_is_paused_too():
    async with running() as (one, client):
        await client.pause()
        async with node(one, name="late"):
            handle = await client.submit([1], SamplingParams(n=64, max_tokens=3))
            with pytest.raises(DeadlineError):
                await handle.result(0.2)
            await client.resume()
            assert len((await handle.result(5)).samples) == 64


@in_loop
async def test_abort_all_ends_everything_with_what_it_has():
    async with running(slow()) as (_, client):
        handle = await client.submit([1], SamplingParams(n=3, max_tokens=4000))
        await asyncio.sleep(0.1)
        await client.abort_all()
        assert [s.finish_reason for s in (await handle.result(5)).samples] == ["abort"] * 3


@in_loop
async def test_work_waits_for_the_first_node():
    async with service() as one, AsyncRolloutClient(one.url) as client:
        assert client.model is None and (await client.health()).status == "no_nodes"
        waiting = asyncio.create_task(client.generate([[1]], SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.05)
        async with node(one):
            assert (await waiting)[0].samples[0].finish_reason == "length"
            assert client.model is not None and client.model.name == "fake"


@in_loop
async def test_a_node_with_another_model_is_refused_and_told_why():
    async with running() as (one, _):
        with pytest.raises(ConnectError, match="fingerprint") as caught:
            async with node(one, lambda: FakeEngine(fingerprint="0" * 64)):
                pass
        assert caught.value.code == "model_mismatch"
        assert len(one.health().nodes) == 1


@in_loop
async def test_a_node_with_older_weights_gets_no_work():
    async with running(lambda: FakeEngine(version=3)) as (one, client), node(one, name="old"):
        await client.generate([[1]] * 32, SamplingParams(max_tokens=2))
        old = next(each for each in one.health().nodes if each.name == "old")
        assert not old.serving and one.health().weights_version == 3
        told = await asyncio.to_thread(CliRunner().invoke, app, ["check", one.url])
        assert "set aside until the next update: holds weights version 0" in told.output


@in_loop
async def test_a_client_never_has_more_open_requests_than_its_credits():
    async with running(slow(), limits=ServiceLimits(credits=4)) as (one, client):
        seen = []
        work = asyncio.create_task(client.generate([[1]] * 40, SamplingParams(max_tokens=2)))
        while not work.done():
            seen.append(one.stats().open_requests)
            await asyncio.sleep(0.005)
        assert len(await work) == 40 and 0 < max(seen) <= 4
        assert not any(name.startswith("rejected") for name in one.stats().counters)


@in_loop
async def test_requests_rejected_for_want_of_room_are_sent_again_later():
    async with running(slow(), limits=ServiceLimits(max_queued_requests=3, retry_after_s=0.05)) as (one, client):
        groups = await client.generate([[k] for k in range(12)], SamplingParams(max_tokens=2))
        assert [g.samples[0].finish_reason for g in groups] == ["length"] * 12
        counters = one.stats().counters
        assert counters["rejected_queue_full"] > 0 and counters["accepted_requests"] == 12


@in_loop
async def test_the_same_request_twice_is_generated_once_and_answered_twice():
    engine = FakeEngine()
    async with service() as one, node(one, lambda: engine):
        with RawPeer(one.url) as raw:
            raw.hello()
            assert (await raw.expect("welcome"))["service"]
            head = wire.RequestHead(0, "ids", 1, 0, 7)
            for _ in range(2):
                raw.submit(head, params=[{"max_tokens": 2}], ids=encode_ids([1]))
                assert (await raw.expect("accept"))["requests"] == [0]
            first = await raw.expect("results")
            raw.submit(head, params=[{"max_tokens": 2}], ids=encode_ids([1]))
            assert await raw.expect("results") == first
            assert len(engine.submitted) == 1
            raw.send(wire.Ack(seq=first["seq"], floor=0))
            raw.submit(head, params=[{"max_tokens": 2}], ids=encode_ids([1]))
            assert (await raw.expect("reject"))["error"]["code"] == "already_finished"


@in_loop
async def test_a_session_resumed_on_a_new_connection_misses_nothing():
    engine = FakeEngine(step_s=0.01, tokens_per_step=1)
    async with service(QUICK) as one, node(one, lambda: engine):
        with RawPeer(one.url) as raw:
            raw.hello("ab" * 16)
            await raw.expect("welcome")
            raw.submit(wire.RequestHead(0, "ids", 1, 0, 7), params=[{"n": 3, "max_tokens": 5}], ids=encode_ids([1]))
            await raw.expect("accept")
        with RawPeer(one.url) as raw:
            raw.hello("ab" * 16)
            assert (await raw.expect("welcome"))["resumed"] is True
            raw.submit(wire.RequestHead(0, "ids", 1, 0, 7), params=[{"n": 3, "max_tokens": 5}], ids=encode_ids([1]))
            got = []
            while len(got) < 3:
                got += [item["index"] for item in (await raw.expect("results"))["items"] if item["item"] == "sample"]
            assert sorted(got) == [0, 1, 2] and len(engine.submitted) == 1


@in_loop
async def test_bad_params_and_bad_frames_refuse_their_requests_and_the_session_goes_on():
    async with service() as one, node(one), asyncio.timeout(10):
        with RawPeer(one.url) as raw:
            raw.hello()
            await raw.expect("welcome")
            heads = [wire.RequestHead(0, "ids", 1, 0, 7), wire.RequestHead(1, "ids", 1, 1, 7)]
            raw.submit(*heads, params=[{"n": 5_000_000}, {"max_tokens": 1}], ids=encode_ids([1, 2]))
            reject = await raw.expect("reject")
            assert reject["requests"] == [0] and reject["error"]["code"] == "invalid_params"
            assert (await raw.expect("results"))["items"][0]["request"] == 1
            raw.submit(wire.RequestHead(2, "ids", 100, 0, 7), ids=encode_ids([1]))
            assert (await raw.expect("reject"))["error"]["code"] == "protocol_error"
            raw.submit(wire.RequestHead(3, "chat", 5, 0, 7), params=[{"max_tokens": 1}], text=b"[1,2]")
            (item,) = (await raw.expect("results"))["items"]
            assert item["error"]["code"] == "invalid_prompt"


@in_loop
async def test_stats_and_health_are_answered_on_both_planes_and_count_what_happened():
    async with running() as (_, client):
        await client.generate([[1], []], SamplingParams(max_tokens=2))
        stats = await client.stats()
        assert (stats.clients, stats.open_requests, len(stats.nodes)) == (1, 0, 1)
        assert stats.counters["finished_length"] == 1 and stats.counters["finished_error"] == 1
        assert (await client.health()).nodes[0].name == "node-0"
        with RawPeer(client.admin_url) as raw:
            raw.send(msgspec.msgpack.encode({"type": "get_health", "call": 3}))
            answer = await raw.expect("admin_answer")
            assert answer["call"] == 3 and msgspec.msgpack.decode(answer["frames"][0])["status"] == "ok"


@in_loop
async def test_unreadable_admin_messages_are_answered_and_the_service_goes_on():
    async with running() as (_, client):
        with RawPeer(client.admin_url) as raw:
            for garbage in (b"", b"\xc1", b"x" * 70_000, msgspec.msgpack.encode({"type": "exec"})):
                raw.send(garbage)
                assert (await raw.expect("refused"))["error"]["code"] == "protocol_error"
        await client.pause()
        await client.resume()


@in_loop
async def test_shutdown_finishes_what_runs_and_refuses_what_is_new():
    async with running(slow()) as (one, client):
        handle = await client.submit([1], SamplingParams(max_tokens=20))
        await until(lambda: one.stats().open_requests == 1)
        await client.shutdown(drain_s=5)
        (late,) = await client.generate([[2]], SamplingParams(max_tokens=2))
        assert late.samples[0].error.code == "draining"
        assert (await handle.result(5)).samples[0].finish_reason == "length"
        await one.stopped()


@in_loop
async def test_a_draining_node_finishes_what_it_has_gets_no_more_and_leaves():
    engine = FakeEngine(step_s=0.01, tokens_per_step=1)
    async with running(slow()) as (one, client), node(one, lambda: engine, name="leaver") as leaver:
        work = asyncio.create_task(client.generate([[k] for k in range(20)], SamplingParams(max_tokens=40)))
        await until(lambda: engine.submitted)
        leaver.drain()
        await until(lambda: all(each.name != "leaver" for each in one.health().nodes))
        had = len(engine.submitted)
        await client.generate([[k] for k in range(20)], SamplingParams(max_tokens=2))
        assert len(engine.submitted) == had
        assert all(group.samples[0].finish_reason == "length" for group in await work)
        assert "requeued_samples" not in one.stats().counters


@in_loop
async def test_progress_callbacks_count_every_sample():
    async with running() as (_, client):
        seen = []
        await client.generate([[1], [2], []], SamplingParams(n=2, max_tokens=2), progress=lambda done, total: seen.append((done, total)))
        assert sorted(seen) == [(k, 6) for k in range(1, 7)]


@in_loop
async def test_a_thousand_samples_come_in_few_messages():
    async with running(lambda: FakeEngine(max_num_seqs=2048), window=2048) as (one, client):
        groups = await client.generate([[1, 2, 3]] * 1024, SamplingParams(max_tokens=16))
        assert len(groups) == 1024
        assert one.stats().counters["accepted_requests"] == 1024


@in_loop
async def test_samples_finished_events_carry_the_group_exactly_once_per_prompt():
    async with running() as (_, client):
        events = [event async for event in client.stream([[1], [2]], SamplingParams(n=3, max_tokens=2), tokens=False)]
        assert len(events) == 6 and all(isinstance(event, Finished) for event in events)
        assert sorted(event.prompt_index for event in events if event.group) == [0, 1]
