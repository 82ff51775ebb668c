"""Peers that die, hang, stall, lie or garble: the others never notice more than a delay."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from fake_engine import FakeEngine, fake_tokens
from rollout_kit import QUICK, RawPeer, in_loop, node, running, service, until

from batchgen.sampling_params import SamplingParams
from rollout import limits as bounds
from rollout import wire
from rollout.batches import encode_ids
from rollout.client import AsyncRolloutClient
from rollout.errors import ConnectError, ServiceLostError
from rollout.limits import ServiceLimits
from rollout.service import Service

pytestmark = pytest.mark.fault
HERE = Path(__file__).parent


def slow() -> FakeEngine:
    return FakeEngine(step_s=0.01, tokens_per_step=1)


@asynccontextmanager
async def process(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=HERE)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        await child.wait()


@asynccontextmanager
async def fake_node(one: Service, *options: str, name: str = "child") -> AsyncIterator[asyncio.subprocess.Process]:
    async with process(str(HERE / "fake_node.py"), "--join", one.url, "--name", name, *options) as child:
        await until(lambda: any(each.name == name for each in one.health().nodes), f"node {name} joined")
        yield child


def check(groups, max_tokens: int) -> None:
    for group in groups:
        for sample in group.samples:
            assert sample.finish_reason == "length" and sample.token_ids == fake_tokens(sample.seed, max_tokens)


# ---- dying peers ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_client_killed_in_the_middle_leaves_nothing_behind():
    script = "\n".join(
        [
            "import sys",
            "from rollout import RolloutClient",
            "from batchgen.sampling_params import SamplingParams",
            "with RolloutClient(sys.argv[1]) as client:",
            "    client.generate([[1]] * 100, SamplingParams(max_tokens=4000))",
        ]
    )
    async with running(slow, limits=QUICK) as (one, client):
        async with process("-c", script, one.url) as child:
            await until(lambda: one.stats().open_requests == 100)
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: one.stats().open_requests == 0 and one.stats().clients == 1)
        await until(lambda: one.health().nodes[0].outstanding == 0)
        stats = one.stats()
        assert stats.open_bytes == 0 and stats.counters["orphaned_samples"] == 100
        check(await client.generate([[1]], SamplingParams(max_tokens=2)), 2)


@in_loop
async def test_a_node_killed_in_the_middle_loses_no_sample():
    async with running(slow, limits=QUICK, window=64) as (one, client):
        async with fake_node(one, "--step-s", "0.02") as child:
            work = asyncio.create_task(client.generate([[k] for k in range(60)], SamplingParams(n=2, max_tokens=12)))
            await until(lambda: any(each.name == "child" and each.outstanding for each in one.health().nodes))
            os.kill(child.pid, signal.SIGKILL)
            check(await work, 12)
        stats = one.stats()
        assert stats.counters["requeued_samples"] > 0 and "child" in one.health().lost_nodes[0]


@in_loop
async def test_a_node_whose_engine_crashes_says_so_and_its_samples_run_elsewhere():
    def broken() -> FakeEngine:
        def on_step(engine: FakeEngine) -> None:
            if engine.stats().steps > 2:
                raise RuntimeError("device lost")

        return FakeEngine(step_s=0.01, tokens_per_step=1, on_step=on_step)

    async with running(broken, slow, limits=QUICK) as (one, client):
        check(await client.generate([[k] for k in range(40)], SamplingParams(max_tokens=8)), 8)
        assert one.stats().counters["nodes_lost_left"] == 1


@in_loop
async def test_a_stopped_node_is_noticed_by_its_silence_and_may_come_back():
    async with running(slow, limits=QUICK) as (one, client), fake_node(one, "--step-s", "0.01") as child:
        work = asyncio.create_task(client.generate([[k] for k in range(60)], SamplingParams(max_tokens=60)))
        await until(lambda: any(each.name == "child" and each.outstanding for each in one.health().nodes))
        os.kill(child.pid, signal.SIGSTOP)
        await until(lambda: len(one.health().nodes) == 1)
        check(await work, 60)
        os.kill(child.pid, signal.SIGCONT)
        await until(lambda: len(one.health().nodes) == 2)
        check(await client.generate([[k] for k in range(40)], SamplingParams(max_tokens=4)), 4)


@in_loop
async def test_an_engine_that_hangs_is_noticed_although_its_node_still_answers():
    hang = threading.Event()

    def hanging() -> FakeEngine:
        return FakeEngine(tokens_per_step=1, on_step=lambda engine: engine.stats().steps > 1 and hang.wait(10) and None)

    limits = ServiceLimits(heartbeat_s=0.1, engine_stall_s=0.6)
    async with running(hanging, slow, limits=limits) as (one, client):
        try:
            check(await client.generate([[k] for k in range(20)], SamplingParams(max_tokens=6)), 6)
            assert one.stats().counters["nodes_lost_stalled"] == 1
        finally:
            hang.set()


@in_loop
async def test_losing_the_only_node_is_an_error_after_the_grace_time_not_a_hang():
    limits = ServiceLimits(heartbeat_s=0.1, no_node_grace_s=0.3)
    async with service(limits) as one, AsyncRolloutClient(one.url) as client:
        async with node(one, slow):
            work = asyncio.create_task(client.generate([[1], [2]], SamplingParams(max_tokens=4000)))
            await until(lambda: one.health().nodes[0].outstanding)
        assert [group.samples[0].error.code for group in await work] == ["no_nodes", "no_nodes"]
        assert (await client.health()).status == "no_nodes"


@in_loop
async def test_a_client_waiting_for_a_killed_service_gets_a_typed_error():
    script = "\n".join(
        [
            "import asyncio, sys",
            "from rollout.service import Service, ServiceConfig",
            "async def main():",
            "    async with Service(ServiceConfig(url='tcp://127.0.0.1:0', admin_url='tcp://127.0.0.1:0')) as one:",
            "        print(one.url, flush=True)",
            "        await one.stopped()",
            "asyncio.run(main())",
        ]
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    url = (await child.stdout.readline()).decode().strip()
    async with AsyncRolloutClient(url, service_timeout_s=0.8, connect_timeout_s=0.5) as client:
        work = asyncio.create_task(client.generate([[1]], SamplingParams(max_tokens=2)))
        await asyncio.sleep(0.1)
        child.kill()
        with pytest.raises(ServiceLostError):
            await work
        with pytest.raises((ConnectError, ServiceLostError)):
            await client.generate([[1]])
    await child.wait()


@in_loop
async def test_a_service_that_stops_tells_its_clients_at_once():
    async with service() as one:
        client = AsyncRolloutClient(one.url)
        await client.connect()
        work = asyncio.create_task(client.generate([[1]], SamplingParams(max_tokens=2)))
        await until(lambda: one.stats().open_requests == 1)
    with pytest.raises(ServiceLostError) as caught:
        await work
    assert caught.value.code == "service_stopped"
    await client.close()


@in_loop
async def test_nobody_at_the_address_is_a_typed_error_after_the_connect_timeout():
    with pytest.raises(ConnectError):
        async with AsyncRolloutClient("tcp://127.0.0.1:9", connect_timeout_s=0.2):
            pass


@in_loop
async def test_a_blocked_loop_blames_nobody_for_its_own_silence():
    async with running(slow, limits=QUICK, service_timeout_s=1.0) as (one, client):
        work = asyncio.create_task(client.generate([[k] for k in range(10)], SamplingParams(max_tokens=20)))
        await until(lambda: one.stats().open_requests)
        time.sleep(2.5)  # noqa: ASYNC251 - service, node and client share this loop
        check(await work, 20)
        stats = one.stats()
        assert stats.counters["late_heartbeats"] == 1 and stats.clients == 1 and "lost_nodes" not in stats.counters


# ---- cut connections ---------------------------------------------------------------------------------------------------------


class Relay:
    """A TCP relay that can cut every connection and refuse new ones."""

    def __init__(self, target: str):
        self.port = int(target.rpartition(":")[2])
        self.writers: set[asyncio.StreamWriter] = set()
        self.open = True

    async def __aenter__(self) -> "Relay":
        self.server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.cut()

    def cut(self) -> None:
        for writer in list(self.writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers |= {writer, far_writer}
        await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))
        self.writers -= {writer, far_writer}

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@in_loop
async def test_a_client_cut_off_for_a_moment_gets_every_result_once_and_nothing_runs_twice():
    engine = slow()
    limits = ServiceLimits(heartbeat_s=0.1, reconnect_grace_s=5.0)
    async with service(limits) as one, node(one, lambda: engine), Relay(one.url) as relay, AsyncRolloutClient(relay.url) as client:
        work = asyncio.create_task(client.generate([[k] for k in range(200)], SamplingParams(n=2, max_tokens=30)))
        for _ in range(3):
            await asyncio.sleep(0.3)
            relay.cut()
        check(await work, 30)
        assert one.stats().counters["resumed_sessions"] >= 1
    assert sum(len(request.sample_indices) for request in engine.submitted) == 400


@in_loop
async def test_a_node_cut_off_for_a_moment_joins_again_and_no_sample_is_lost():
    async with (
        service(QUICK) as one,
        Relay(one.url) as relay,
        node(one, slow, name="steady"),
        node(one, slow, name="cut", url=relay.url),
        AsyncRolloutClient(one.url) as client,
    ):
        work = asyncio.create_task(client.generate([[k] for k in range(80)], SamplingParams(max_tokens=40)))
        await until(lambda: one.stats().open_requests)
        await asyncio.sleep(0.1)
        relay.cut()
        check(await work, 40)
        await until(lambda: len(one.health().nodes) == 2)


# ---- bad manners -------------------------------------------------------------------------------------------------------------


@in_loop
async def test_garbage_is_answered_with_a_reason_and_disturbs_nobody():
    async with running(slow) as (one, client):
        work = asyncio.create_task(client.generate([[1]] * 20, SamplingParams(max_tokens=20)))
        with RawPeer(one.url) as raw:
            for header in (b"", b"\xc1", b"\x80", os.urandom(500), b"x" * (bounds.MAX_HEADER_BYTES + 1), b"\x91" * 60_000):
                raw.send(header)
                assert (await raw.expect("bye"))["error"]["code"] == "protocol_error"
            raw.socket.send_multipart([b"x"] * (bounds.MAX_FRAMES + 2))
            assert (await raw.expect("bye"))["error"]["code"] == "protocol_error"
        check(await work, 20)


@in_loop
async def test_messages_without_a_hello_are_refused():
    async with service() as one:
        with RawPeer(one.url) as raw:
            raw.submit(wire.RequestHead(0, "ids", 1, 0, 7), ids=encode_ids([1]))
            assert (await raw.expect("bye"))["error"]["code"] == "unknown_session"
            raw.send(wire.Hello(version=99, session="0" * 32))
            assert (await raw.expect("bye"))["error"]["code"] == "version_mismatch"
        assert one.stats().open_requests == 0


@in_loop
async def test_a_frame_over_the_size_limit_cuts_its_sender_only():
    async with running(slow) as (one, client):
        with RawPeer(one.url) as raw:
            raw.send(wire.Hello(version=1, session="0" * 32), b"\0" * (bounds.MAX_ITEM_BYTES + 1))
            assert await raw.frames(0.5) is None
        check(await client.generate([[1]], SamplingParams(max_tokens=2)), 2)


@in_loop
async def test_a_second_connection_under_a_taken_routing_id_cannot_disturb_the_first():
    async with running(slow) as (one, client):
        with RawPeer(one.url, identity=b"same") as first:
            first.hello("a" * 32)
            await first.expect("welcome")
            with RawPeer(one.url, identity=b"same") as second:
                second.hello("b" * 32)
                assert await second.frames(0.3) is None
                first.submit(wire.RequestHead(0, "ids", 1, 0, 7), params=[{"max_tokens": 1}], ids=encode_ids([1]))
                await first.expect("results")
        check(await client.generate([[1]], SamplingParams(max_tokens=2)), 2)


@in_loop
async def test_the_same_session_on_a_second_connection_replaces_the_first():
    async with service() as one:
        with RawPeer(one.url) as first, RawPeer(one.url) as second:
            first.hello("a" * 32)
            await first.expect("welcome")
            second.hello("a" * 32)
            assert (await second.expect("welcome"))["resumed"] is True
            assert (await first.expect("bye"))["error"]["code"] == "replaced"
            assert one.stats().clients == 1


@in_loop
async def test_a_client_that_reads_but_never_acknowledges_is_dropped_with_a_reason():
    limits = ServiceLimits(outbox_bytes=20_000)
    async with running(FakeEngine, limits=limits) as (one, client):
        with RawPeer(one.url) as raw:
            raw.hello()
            await raw.expect("welcome")
            heads = [wire.RequestHead(k, "ids", 1, 0, 7) for k in range(300)]
            raw.submit(*heads, params=[{"max_tokens": 16}], ids=encode_ids([1] * 300))
            assert (await raw.expect("bye"))["error"]["code"] == "slow_reader"
        await until(lambda: one.stats().open_requests == 0)
        check(await client.generate([[1]], SamplingParams(max_tokens=2)), 2)


@in_loop
async def test_a_client_that_stops_reading_is_dropped_and_its_memory_freed():
    def small_buffer(socket: zmq.Socket) -> None:
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVBUF, 4096)

    limits = ServiceLimits(outbox_bytes=2_000_000)
    async with running(lambda: FakeEngine(tokens_per_step=4000, max_num_seqs=64), limits=limits) as (one, client):
        with RawPeer(one.url, setup=small_buffer) as raw:
            raw.hello()
            await raw.expect("welcome")
            for start in range(0, 600, 100):
                heads = [wire.RequestHead(start + k, "ids", 1, 0, 7) for k in range(100)]
                raw.submit(*heads, params=[{"max_tokens": 4000}], ids=encode_ids([1] * 100))
            await until(lambda: one.stats().clients == 1, "the slow client was dropped")
        await until(lambda: one.stats().open_requests == 0)
        assert one.stats().counters["dropped_clients_slow_reader"] == 1
        check(await client.generate([[1]], SamplingParams(max_tokens=2)), 2)


@in_loop
async def test_a_node_that_sends_lies_is_expelled_and_its_samples_run_elsewhere():
    async with service(QUICK) as one, AsyncRolloutClient(one.url) as client:
        with RawPeer(one.url) as liar:
            facts = FakeEngine().facts
            liar.send(wire.NodeHello(version=1, session=secrets.token_hex(16), name="liar", model=facts, weights_version=0, window=10))
            await liar.expect("welcome")
            work = asyncio.create_task(client.generate([[1]], SamplingParams(max_tokens=2)))
            part = (await liar.expect("assign"))["parts"][0][0]
            item = wire.SampleItem(
                request=part, index=0, finish_reason="stop", num_tokens=1000, text_bytes=0, seed=0, logprobs_mode="raw", spans=[]
            )
            liar.send(wire.Results(seq=0, items=[item]), b"short")
            assert (await liar.expect("bye"))["error"]["code"] == "protocol_error"
            async with node(one, slow):
                check(await work, 2)


@in_loop
async def test_a_node_cannot_finish_samples_it_was_not_given():
    async with running(slow, limits=QUICK) as (one, _client):
        with RawPeer(one.url) as liar:
            facts = FakeEngine().facts
            liar.send(wire.NodeHello(version=1, session=secrets.token_hex(16), name="liar", model=facts, weights_version=9, window=10))
            await liar.expect("welcome")
            await until(lambda: len(one.health().nodes) == 2)
            for part in range(5):
                item = wire.SampleItem(
                    request=part, index=0, finish_reason="stop", num_tokens=0, text_bytes=0, seed=0, logprobs_mode="raw", spans=[]
                )
                liar.send(wire.Results(seq=0, items=[item]), b"")
            await until(lambda: one.stats().counters.get("late_results") == 5)


@in_loop
async def test_too_many_clients_are_refused_with_a_reason():
    async with service(ServiceLimits(max_clients=1)) as one, AsyncRolloutClient(one.url):
        with pytest.raises(ConnectError) as caught:
            async with AsyncRolloutClient(one.url):
                pass
        assert caught.value.code == "too_many_clients"


@in_loop
async def test_a_client_shown_garbage_by_its_service_raises_a_typed_error():
    context = zmq.Context()
    try:
        with context.socket(zmq.ROUTER) as fake:
            fake.setsockopt(zmq.LINGER, 0)
            port = fake.bind_to_random_port("tcp://127.0.0.1")

            def answer() -> None:
                peer = fake.recv_multipart()[0]
                fake.send_multipart([peer, msgspec.msgpack.encode({"type": "eval"})])

            speaker = asyncio.create_task(asyncio.to_thread(answer))
            with pytest.raises(ConnectError, match="unreadable"):
                async with AsyncRolloutClient(f"tcp://127.0.0.1:{port}", connect_timeout_s=3):
                    pass
            await speaker
    finally:
        context.term()
