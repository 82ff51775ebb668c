"""Helpers of the rollout tests: a service with fake nodes in this loop, raw peers, and waiting with a deadline."""

import asyncio
import functools
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
from fake_engine import FakeEngine

from rollout import wire
from rollout.client import AsyncRolloutClient
from rollout.limits import PROTOCOL_VERSION, ServiceLimits
from rollout.node import Node, NodeConfig
from rollout.service import Service, ServiceConfig

TEST_S = 20.0
QUICK = ServiceLimits(heartbeat_s=0.1, client_timeout_s=1.0, reconnect_grace_s=0.4, node_timeout_s=1.0)
"""Faults are noticed within about a second."""


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, at most TEST_S."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(TEST_S):
                await test(*args, **named)

        asyncio.run(bounded())

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


@asynccontextmanager
async def service(limits: ServiceLimits | None = None, **options: Any) -> AsyncIterator[Service]:
    urls = {"url": "tcp://127.0.0.1:0", "admin_url": "tcp://127.0.0.1:0"} | options
    async with Service(ServiceConfig(limits=limits or ServiceLimits(), **urls)) as one:
        yield one


@asynccontextmanager
async def node(
    one: Service, factory: Callable[[], Any] = FakeEngine, *, name: str = "", window: int = 1024, keys: Any = None, url: str | None = None
) -> AsyncIterator[Node]:
    made = Node(NodeConfig(url=url or one.url, name=name, window=window, keys=keys, join_timeout_s=10), factory)
    task = asyncio.create_task(made.run())
    try:
        joined = asyncio.create_task(made.joined.wait())
        await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if task.done():
            await task
        yield made
    finally:
        made.stop()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(
    *factories: Callable[[], Any], limits: ServiceLimits | None = None, window: int = 1024, **client: Any
) -> AsyncIterator[tuple[Service, AsyncRolloutClient]]:
    """A service with one node per factory (default one FakeEngine) and a connected client."""
    async with service(limits) as one:
        nodes = [node(one, factory, name=f"node-{k}", window=window) for k, factory in enumerate(factories or (FakeEngine,))]
        for each in nodes:
            await each.__aenter__()
        try:
            async with AsyncRolloutClient(one.url, seed=1, **client) as connected:
                await connected.wait_ready(10)
                yield one, connected
        finally:
            for each in reversed(nodes):
                await each.__aexit__(None, None, None)


async def until(condition: Callable[[], Any], what: str = "the condition", timeout_s: float = 10.0) -> None:
    """Wait until it holds."""
    ends = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < ends, f"{what} did not hold within {timeout_s} s"
        await asyncio.sleep(0.01)


class RawPeer:
    """A DEALER without any of our client's manners."""

    def __init__(self, url: str, *, identity: bytes | None = None, setup: Callable[[zmq.Socket[Any]], None] | None = None):
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if setup is not None:
            setup(self.socket)
        self.socket.connect(url)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def send(self, header: msgspec.Struct | bytes, *frames: bytes) -> None:
        self.socket.send_multipart([header if isinstance(header, bytes) else msgspec.msgpack.encode(header), *frames])

    def hello(self, session: str | None = None) -> None:
        self.send(wire.Hello(version=PROTOCOL_VERSION, session=session or secrets.token_hex(16), name="raw"))

    def submit(self, *heads: wire.RequestHead, params: Sequence[Any] = ({},), ids: bytes = b"", text: bytes = b"") -> None:
        self.send(wire.Submit(requests=list(heads)), msgspec.msgpack.encode(list(params)), ids, text)

    async def frames(self, timeout_s: float = 5.0) -> list[bytes] | None:
        """The next message, or None."""
        ends = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < ends:
            try:
                return list(self.socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                await asyncio.sleep(0.005)
        return None

    async def expect(self, kind: str, timeout_s: float = 5.0) -> dict[str, Any]:
        """The next message of this type, pings answered and others skipped; its bulk frames under `frames`."""
        ends = asyncio.get_running_loop().time() + timeout_s
        while (left := ends - asyncio.get_running_loop().time()) > 0:
            frames = await self.frames(left)
            if frames is None:
                break
            header: dict[str, Any] = msgspec.msgpack.decode(frames[0])
            if header["type"] == kind:
                return header | {"frames": frames[1:]}
            if header["type"] == "ping":
                self.send(wire.Pong(sent=header["sent"]))
        raise AssertionError(f"no {kind} came within {timeout_s} s")
