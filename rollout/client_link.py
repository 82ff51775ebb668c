"""A client's connection to the service: hello, liveness, coming back. In: messages to send. Out: messages, news of the service.

Knows nothing of requests. Short cuts are bridged: libzmq reconnects, the service says that it does not know the new connection, and the
link says hello again under its old session id.
"""

import asyncio
from typing import Any, Protocol

import msgspec
import zmq

from batchgen.errors import ErrorInfo
from rollout import limits, sockets, wire
from rollout.errors import ClosedError, ConnectError, ProtocolError, RolloutError, ServiceLostError
from rollout.security import ClientKeys

OUTBOX_BYTES = 256 * 1024 * 1024
RESUMABLE = ("unknown_session", "client_lost")
"""Reasons for a bye after which the link says hello again."""
LAG_S = 1.0
"""A loop that was late by more than this was blocked: the silence meanwhile was its own."""
_decoder = wire.HeaderDecoder(wire.ToClient)


class Owner(Protocol):
    """Who uses a link."""

    def on_welcome(self, message: wire.Welcome, fresh: bool) -> None:
        """The service knows this session (again: `fresh`), or told news of its model."""

    def on_message(self, message: Any, frames: list[zmq.Frame]) -> None:
        """Results, accepts, rejects, answers. ProtocolError ends the link."""

    def on_lost(self, error: RolloutError) -> None:
        """What waits must raise this."""

    def on_beat(self, now: float) -> None:
        """Some time has passed."""


class Link:
    """One session on one DEALER socket, in the running loop."""

    def __init__(self, owner: Owner, url: str, keys: ClientKeys | None, session: str, name: str, service_timeout_s: float):
        """BadAddressError."""
        self.url = url
        self.welcome: wire.Welcome | None = None
        self.closed = False
        self._owner = owner
        self._session, self._name, self._service_timeout_s = session, name, service_timeout_s
        self._fault: RolloutError | None = None
        self._greeting = False
        self._welcomed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.context: zmq.Context[Any] = zmq.Context()
        try:
            socket = sockets.dealer(self.context, url, keys=keys)
        except RolloutError:
            self.context.term()
            raise
        self._channel = sockets.Channel(socket, outbox_bytes=OUTBOX_BYTES, on_message=self._receive, on_trouble=self._trouble)
        self._heard_at = self._loop.time()
        self._hello()
        self._keeper = asyncio.create_task(self._keep())

    @property
    def up(self) -> bool:
        """Whether the service knows this session, as far as we have heard."""
        return self._welcomed.is_set() and not self.closed and self._fault is None

    async def wait(self, timeout_s: float) -> None:
        """Wait until the link is up. ConnectError in time, or at once when the service will not have us; ClosedError."""
        if self.closed:
            raise ClosedError("the client is closed; make a new one")
        try:
            async with asyncio.timeout(timeout_s):
                await self._welcomed.wait()
        except TimeoutError:
            raise ConnectError(f"no rollout service answered at {self.url} within {timeout_s:g} s") from None
        if self._fault is not None:
            raise self._fault

    def send(self, message: msgspec.Struct) -> None:
        self.send_frames([wire.encode(message)])

    def send_frames(self, frames: list[Any]) -> None:
        if not self.closed and self._channel.send(b"", frames) == "stuck":
            self._lose(ServiceLostError(f"{self.url} does not read what it is sent"))

    def say_bye(self) -> None:
        """Nothing is sent or received after this."""
        self.send(wire.Bye(error=ErrorInfo(code="client_left", message="the client was closed")))
        self.closed = True

    async def close(self) -> None:
        """After say_bye. Other sockets of the context must be closed before."""
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._channel.close()
        await asyncio.to_thread(self.context.term)

    def _hello(self) -> None:
        self._greeting = True
        self.send(wire.Hello(version=limits.PROTOCOL_VERSION, session=self._session, name=self._name))

    async def _keep(self) -> None:
        """Ping, notice a silent service, repeat hellos."""
        while True:
            interval = min(self.welcome.heartbeat_s if self.welcome is not None else 1.0, self._service_timeout_s / 4)
            due = self._loop.time() + interval
            await asyncio.sleep(interval)
            now = self._loop.time()
            if now - due > LAG_S:
                self._heard_at = now
            if now - self._heard_at > self._service_timeout_s:
                self._lose(ServiceLostError(f"{self.url} was silent for {now - self._heard_at:.1f} s; unfinished requests are lost"))
            if self._welcomed.is_set():
                self.send(wire.Ping(sent=now))
            else:
                self._hello()
            self._owner.on_beat(now)

    def _receive(self, _: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = _decoder.decode(frames[0].buffer)
            self._heard_at = self._loop.time()
            match message:
                case wire.Welcome():
                    self._greet(message)
                case wire.Ping():
                    self.send(wire.Pong(sent=message.sent))
                case wire.Bye():
                    self._goodbye(message.error)
                case _:
                    self._owner.on_message(message, frames[1:])
        except ProtocolError as error:
            self._end(ConnectError(f"the service at {self.url} sent something unreadable: {error}"))

    def _greet(self, message: wire.Welcome) -> None:
        if message.version != limits.PROTOCOL_VERSION:
            self._end(ConnectError(f"the service speaks protocol version {message.version}, this client {limits.PROTOCOL_VERSION}"))
            return
        fresh, self._greeting, self.welcome = self._greeting, False, message
        self._welcomed.set()
        self._owner.on_welcome(message, fresh)

    def _goodbye(self, error: ErrorInfo) -> None:
        if error.code in RESUMABLE:
            if not self._greeting:
                self._welcomed.clear()
                self._hello()
        elif error.code == "service_stopped":
            self._lose(ServiceLostError(error.message, code=error.code))
        else:
            self._end(ConnectError(error.message, code=error.code, retryable=error.retryable))

    def _lose(self, error: RolloutError) -> None:
        """What waits raises; hellos go on, so that later calls may find the service back."""
        self._welcomed.clear()
        self._owner.on_lost(error)

    def _end(self, error: RolloutError) -> None:
        """The service will not have this client: every call, now and later, raises."""
        self._fault = error
        self._welcomed.set()
        self._owner.on_lost(error)

    def _trouble(self, _: bytes, result: sockets.SendResult) -> None:
        self._lose(ServiceLostError(f"the connection to {self.url} is {result}"))
