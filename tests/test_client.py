"""The client: the blocking facade, seeds, errors, and starting fast."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_engine import FakeEngine, fake_tokens
from rollout_kit import in_loop, node, running, service, until

from batchgen.chat import ChatPrompt
from batchgen.errors import RequestError
from batchgen.sampling_params import SamplingParams
from rollout import RolloutClient
from rollout.client import AsyncRolloutClient
from rollout.errors import ClosedError, ConnectError, DeadlineError
from rollout.results import Finished
from rollout.service import Service


@contextmanager
def background(*factories) -> Iterator[Service]:
    """A service with fake nodes in another thread's loop."""
    box: list[Service] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with service() as one:
            nodes = [node(one, factory) for factory in factories]
            for each in nodes:
                await each.__aenter__()
            box.append(one)
            ready.set()
            await stop.wait()
            for each in nodes:
                await each.__aexit__(None, None, None)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield box[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def slow() -> FakeEngine:
    return FakeEngine(step_s=0.01, tokens_per_step=1)


def test_the_blocking_client_generates_streams_submits_and_administers():
    with background(slow) as one, RolloutClient(one.url, seed=3) as client:
        assert client.wait_ready(5).name == "fake" and client.model is not None and client.seed == 3
        groups = client.generate([[1], "text"], SamplingParams(n=2, max_tokens=3))
        assert [s.token_ids for g in groups for s in g.samples] == [fake_tokens(s.seed, 3) for g in groups for s in g.samples]
        events = list(client.stream([[1]], SamplingParams(max_tokens=3)))
        assert isinstance(events[-1], Finished) and len(events) == 4
        handle = client.submit([1], SamplingParams(max_tokens=4000))
        with pytest.raises(DeadlineError):
            handle.result(0.05)
        handle.cancel()
        assert handle.result(5).samples[0].finish_reason == "abort" and handle.done()
        client.pause()
        assert client.health().status == "paused"
        client.resume()
        client.abort_all()
        assert client.stats().clients == 1 and client.weights_version == 0
        assert client.admin_url == one.admin_url


def test_leaving_a_blocking_stream_cancels_the_rest():
    with background(slow) as one, RolloutClient(one.url) as client:
        for _ in client.stream([[1]] * 4, SamplingParams(max_tokens=4000)):
            break
        for _ in range(500):
            if client.stats().open_requests == 0:
                break
        assert client.stats().open_requests == 0


def test_several_threads_share_one_blocking_client():
    with background(slow) as one, RolloutClient(one.url) as client:
        results: dict[int, int] = {}

        def work(number: int) -> None:
            (group,) = client.generate([[number]], SamplingParams(n=number, max_tokens=2))
            results[number] = len(group.samples)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: number for number in range(1, 9)}


def test_a_closed_client_says_so_and_closing_twice_is_fine():
    with background(FakeEngine) as one:
        client = RolloutClient(one.url)
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            client.generate([[1]])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_used_after_a_fork_says_so_instead_of_waiting_for_ever():
    with background(FakeEngine) as one, RolloutClient(one.url) as client:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                client.generate([[1]])
            except ClosedError as error:
                os.write(writer, str(error).encode())
            finally:
                client.close()
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        assert b"fork" in os.read(reader, 1000)
        os.close(reader)
        assert len(client.generate([[1]])) == 1


def test_the_blocking_client_raises_what_the_async_one_raises():
    with pytest.raises(ConnectError):
        RolloutClient("tcp://127.0.0.1:9", connect_timeout_s=0.2)
    assert not any(thread.name == "rollout-client" for thread in threading.enumerate())


@in_loop
async def test_closing_a_client_ends_the_calls_that_wait():
    async with service() as one:
        client = AsyncRolloutClient(one.url)
        await client.connect()
        work = asyncio.create_task(client.generate([[1]]))
        await until(lambda: one.stats().open_requests == 1)
        await client.close()
        with pytest.raises(ClosedError):
            await work
        await until(lambda: one.stats().open_requests == 0)


@in_loop
async def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    async def once(one: Service, seed: int | None):
        async with AsyncRolloutClient(one.url, seed=seed) as client:
            groups = await client.generate([[1], [1]], SamplingParams(n=2, max_tokens=4))
            return [s.token_ids for g in groups for s in g.samples]

    async with running() as (one, _):
        first = await once(one, 5)
        assert await once(one, 5) == first and await once(one, 6) != first and await once(one, None) != await once(one, None)
        assert len({tuple(tokens) for tokens in first}) == 4


@in_loop
async def test_a_prompts_own_seed_wins_over_the_clients():
    async with running() as (_, client):
        params = SamplingParams(n=2, max_tokens=4, seed=9)
        first, second = await client.generate([[1], [2]], params)
        assert [s.seed for s in first.samples] == [s.seed for s in second.samples]
        assert first.samples[0].token_ids != first.samples[1].token_ids


@pytest.mark.parametrize("prompts", ["a bare string", 7])
@in_loop
async def test_prompts_that_are_no_list_are_refused_before_anything_is_sent(prompts):
    async with running() as (one, client):
        with pytest.raises((ValueError, TypeError)):
            await client.generate(prompts)
        with pytest.raises(ValueError, match="2 prompts but 1"):
            await client.generate([[1], [2]], [SamplingParams()])
        assert "accepted_requests" not in one.stats().counters


@in_loop
async def test_no_prompts_give_no_groups():
    async with running() as (_, client):
        assert await client.generate([]) == []
        assert [event async for event in client.stream([])] == []


@in_loop
async def test_a_cancelled_task_cancels_its_requests():
    async with running(slow) as (one, client):
        work = asyncio.create_task(client.generate([[1]] * 3, SamplingParams(max_tokens=4000)))
        await until(lambda: one.stats().open_requests == 3)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await until(lambda: one.stats().open_requests == 0)


@in_loop
async def test_wait_ready_without_a_node_is_a_typed_error():
    async with service() as one, AsyncRolloutClient(one.url) as client:
        with pytest.raises(DeadlineError, match="no node"):
            await client.wait_ready(0.1)


def test_the_client_imports_without_torch_numpy_and_the_http_or_cli_stack():
    heavy = ["torch", "numpy", "typer", "jinja2", "zmq.auth"]
    code = f"import sys, rollout.client_sync, rollout.client; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = [{"role": "user", "content": "hi"}]


def shown(group) -> str:
    """What FakeTokenizer was given."""
    return bytes(group.prompt_token_ids).decode()


@in_loop
async def test_tools_and_controls_reach_the_nodes_tokenizer_and_a_chats_own_win():
    own = ChatPrompt(messages=CHAT, tools=[], chat_template_kwargs={"effort": "low"})
    async with running() as (_, client):
        options = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
        first, second = await client.generate([CHAT, own], SamplingParams(max_tokens=1), **options)
        assert shown(first) == "<user>hi" + json.dumps([[TOOL], {"enable_thinking": False}])
        assert shown(second) == "<user>hi" + json.dumps([None, {"effort": "low"}])
        handle = await client.submit(CHAT, SamplingParams(max_tokens=1), **options)
        assert shown(await handle.result()) == shown(first)
        async for event in client.stream([CHAT], SamplingParams(max_tokens=1), tokens=False, **options):
            assert shown(event.group) == shown(first)
        assert shown((await client.generate([CHAT], SamplingParams(max_tokens=1)))[0]) == "<user>hi"


@in_loop
async def test_wrong_tools_raise_before_anything_is_sent_and_misplaced_ones_fail_their_rows():
    async with running() as (_, client):
        for wrong in ({"tools": [TOOL, TOOL]}, {"tools": "f"}, {"chat_template_kwargs": {"messages": []}}):
            with pytest.raises(RequestError):
                await client.generate([CHAT], **wrong)
        bad = ChatPrompt(messages=CHAT, tools=[TOOL, TOOL])
        groups = await client.generate([CHAT, [1], "text", bad], SamplingParams(max_tokens=1), tools=[TOOL])
        errors = [group.samples[0].error for group in groups]
        assert [error and error.code for error in errors] == [None, "tools_need_chat", "tools_need_chat", "invalid_tools"]


def test_the_blocking_client_takes_tools_and_controls():
    with background(slow) as one, RolloutClient(one.url) as client:
        groups = client.generate([CHAT], SamplingParams(max_tokens=1), tools=[TOOL])
        assert client.submit(CHAT, SamplingParams(max_tokens=1), tools=[TOOL]).result().prompt_token_ids == groups[0].prompt_token_ids
        event = next(client.stream([CHAT], SamplingParams(max_tokens=1), tokens=False, tools=[TOOL]))
        assert shown(event.group) == shown(groups[0]) == "<user>hi" + json.dumps([[TOOL], {}])
