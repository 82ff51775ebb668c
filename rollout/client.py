"""The asyncio client of a rollout service. In: prompts, sampling parameters. Out: groups, events. Imports fast; no torch.

RolloutClient (client_sync.py) is the same client on a background thread.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import zmq

from batchgen.errors import ErrorInfo
from batchgen.events import ModelFacts
from batchgen.outputs import Group
from batchgen.request import seed_base
from batchgen.sampling_params import SamplingParams
from rollout import admin_wire, limits, sockets, wire
from rollout.calls import Call, ProgressCallback, Prompt, as_list, check_params, encode_prompt
from rollout.client_admin import AdminConnection
from rollout.client_core import ClientCore, OpenRequest
from rollout.errors import ClosedError, ConnectError, DeadlineError, ProtocolError, RolloutError, ServiceLostError
from rollout.results import Finished, Health, Progress, ServiceStats
from rollout.security import ClientKeys

OUTBOX_BYTES = 256 * 1024 * 1024
ADMIN_TIMEOUT_S = 30.0
BREATH = 1024
"""Prompts encoded before the loop gets a turn: a million of them take longer than a heartbeat."""
RESUMABLE = ("unknown_session", "client_lost")
"""Reasons for a bye after which the client says hello again and submits everything unfinished again."""
_decoder = wire.HeaderDecoder(wire.ToClient)
_health = msgspec.msgpack.Decoder(Health)
_stats = msgspec.msgpack.Decoder(ServiceStats)


class Handle:
    """A submitted prompt."""

    def __init__(self, client: "AsyncRolloutClient", call: Call):
        self._client, self._call = client, call

    async def result(self, timeout_s: float | None = None) -> Group:
        """The group. DeadlineError after timeout_s (the request goes on), ServiceLostError."""
        try:
            async with asyncio.timeout(timeout_s):
                return (await asyncio.shield(self._call.done))[0]
        except TimeoutError:
            raise DeadlineError(f"no result within {timeout_s} s; the request goes on") from None

    def done(self) -> bool:
        return self._call.done.done()

    def cancel(self) -> None:
        """End it: samples not finished come back with finish_reason `abort`."""
        self._client._cancel(self._call)


class AsyncRolloutClient:
    """Use as `async with AsyncRolloutClient("tcp://127.0.0.1:5757") as client:`, in one event loop.

    A prompt that cannot be served gives samples with finish_reason `error`; the others finish. Losing the service raises
    ServiceLostError after `service_timeout_s`; shorter cuts are bridged, nothing is generated twice.
    """

    def __init__(
        self, url: str = "tcp://127.0.0.1:5757", *, admin_url: str | None = None, keys: ClientKeys | str | Path | None = None,
        seed: int | None = None, name: str = "", connect_timeout_s: float = 10.0, service_timeout_s: float = 30.0,
        request_timeout_s: float = 3600.0,
    ):  # fmt: skip
        """admin_url: default the service's host with the port it tells. keys: a file of `rollout keys`. seed: run seed of this client's
        requests, default random; the k-th prompt's samples have seeds hash(hash(seed, k), sample). request_timeout_s: deadline of
        each request, counted from its submission."""
        if not 0 < request_timeout_s <= limits.MAX_TIMEOUT_S:
            raise ValueError(f"request_timeout_s is in (0, {limits.MAX_TIMEOUT_S:g}], got {request_timeout_s}")
        self.url = url
        self.seed = secrets.randbits(64) if seed is None else seed
        self.session = secrets.token_hex(16)
        self.model: ModelFacts | None = None
        """Facts of the served model; None until the service has a node."""
        self.weights_version = 0
        """The service's, as last told."""
        self._admin_url = admin_url
        self._keys = ClientKeys.load(keys) if isinstance(keys, str | Path) else keys
        self._name = name
        self._connect_timeout_s, self._service_timeout_s, self._request_timeout_s = connect_timeout_s, service_timeout_s, request_timeout_s
        self._core = ClientCore()
        self._calls: set[Call] = set()
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self._next_query = 0
        self._welcome: wire.Welcome | None = None
        self._welcomed = asyncio.Event()
        self._ready = asyncio.Event()
        self._fault: RolloutError | None = None
        self._greeting = False
        self._heard_at = 0.0
        self._admin: AdminConnection | None = None
        self._channel: sockets.Channel | None = None
        self._closed = False
        self._flush_due: asyncio.Handle | None = None

    # ---- life ----------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "AsyncRolloutClient":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Say hello and wait for the welcome. ConnectError after connect_timeout_s or when refused; BadAddressError."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            socket = sockets.dealer(self._context, self.url, keys=self._keys)
        except RolloutError:
            self._context.term()
            raise
        self._channel = sockets.Channel(socket, outbox_bytes=OUTBOX_BYTES, on_message=self._receive, on_trouble=self._trouble)
        self._heard_at = self._loop.time()
        self._hello()
        self._keeper = asyncio.create_task(self._keep())
        try:
            await self._wait_for_welcome()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave: the service drops this client's unfinished requests; calls that wait raise ClosedError."""
        channel = self._channel
        if self._closed or channel is None:
            return
        self._send(wire.Bye(error=ErrorInfo(code="client_left", message="the client was closed")))
        self._closed = True
        self._fail_calls(ClosedError("the client was closed while a call waited"))
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._admin is not None:
            self._admin.close()
        channel.close()
        await asyncio.to_thread(self._context.term)

    async def wait_ready(self, timeout_s: float = 120.0) -> ModelFacts:
        """Wait until the service has a node; returns the model's facts. DeadlineError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise DeadlineError(f"no node joined the service at {self.url} within {timeout_s:g} s") from None
        if self.model is None:
            raise ServiceLostError("the service went away before a node had joined")
        return self.model

    # ---- generation ------------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *, timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> list[Group]:  # fmt: skip
        """All groups, in the prompts' order. A prompt is a list of token ids, a string, or chat messages.

        Raises DeadlineError after timeout_s (everything unfinished is cancelled), ServiceLostError, ClosedError.
        """
        call = await self._start(prompts, params, progress=progress)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            raise DeadlineError(f"the batch was not done within {timeout_s} s; its unfinished requests were cancelled") from None
        finally:
            self._finish(call)

    async def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *, timeout_s: float | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[Progress | Finished]:  # fmt: skip
        """Events as they happen: Progress for new tokens (if `tokens`), Finished for each sample. Leaving the loop cancels the rest."""
        call = await self._start(prompts, params, events=True, tokens=tokens)
        events = call.events
        if events is None:
            raise RuntimeError("a stream has no queue")
        remaining = sum(request.n for request in call.requests)
        ends = None if timeout_s is None else self._loop.time() + timeout_s
        try:
            while remaining:
                event = await asyncio.wait_for(events.get(), None if ends is None else max(0.0, ends - self._loop.time()))
                if event is None:
                    await call.done
                    return
                remaining -= isinstance(event, Finished)
                yield event
        except TimeoutError:
            raise DeadlineError(f"the stream was not done within {timeout_s} s; its unfinished requests were cancelled") from None
        finally:
            self._finish(call)

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Handle:
        """Start one prompt and return at once."""
        call = await self._start([prompt], params)
        call.done.add_done_callback(lambda _: self._calls.discard(call))
        return Handle(self, call)

    # ---- administration ----------------------------------------------------------------------------------------------------------

    async def update_weights(
        self, named_tensors: Any, version: int, policy: Literal["finish", "abort", "continue"] = "finish", *, timeout_s: float = 300.0
    ) -> Any:
        """Push weights (a module, {name: tensor}, pairs, or a safetensors path) in place; see weights_sync.WeightPublisher.push."""
        from weights_sync.publisher import WeightPublisher

        return await asyncio.to_thread(WeightPublisher(self).push, named_tensors, version, policy, timeout_s=timeout_s)

    def open_admin_channel(self) -> Any:
        """A blocking connection to the admin plane for a publisher; belongs to the thread that calls this."""
        from weights_sync.channel import ZmqChannel

        return ZmqChannel(sockets.dealer(self._context, self.admin_url, keys=self._keys))

    @property
    def admin_url(self) -> str:
        """Given, or learned from the service. ConnectError when it is neither."""
        if self._admin_url is not None:
            return self._admin_url
        port = self._welcome.admin_port if self._welcome is not None else 0
        host = urlsplit(self.url).hostname
        if not port or not host:
            raise ConnectError(f"the admin address of {self.url} is not known; pass admin_url=")
        return f"tcp://{host}:{port}"

    async def pause(self) -> None:
        """Stop device work after the running step; requests are still taken."""
        await self._admin_call(admin_wire.Pause(call=0))

    async def resume(self) -> None:
        await self._admin_call(admin_wire.Resume(call=0))

    async def abort_all(self) -> None:
        """End every request of every client with finish_reason `abort`."""
        await self._admin_call(admin_wire.AbortAll(call=0))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Stop the service and its nodes; running requests have drain_s to finish."""
        await self._admin_call(admin_wire.Shutdown(call=0, drain_s=drain_s))

    async def health(self, timeout_s: float = 10.0) -> Health:
        health: Health = _health.decode(await self._query("health", timeout_s))
        return health

    async def stats(self, timeout_s: float = 10.0) -> ServiceStats:
        stats: ServiceStats = _stats.decode(await self._query("stats", timeout_s))
        return stats

    async def _admin_call(self, message: Any) -> None:
        await self._wait_for_welcome()
        if self._admin is None:
            self._admin = AdminConnection(self._context, self.admin_url, self._keys)
        await self._admin.call(message, ADMIN_TIMEOUT_S)

    async def _query(self, what: Literal["health", "stats"], timeout_s: float) -> bytes:
        await self._wait_for_welcome()
        number, self._next_query = self._next_query, self._next_query + 1
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._queries[number] = future
        self._send(wire.Query(call=number, what=what))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise ServiceLostError(f"{self.url} did not tell its {what} within {timeout_s:g} s") from None
        finally:
            self._queries.pop(number, None)

    # ---- calls ---------------------------------------------------------------------------------------------------------------

    async def _start(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None, *, progress: ProgressCallback | None = None,
        events: bool = False, tokens: bool = False,
    ) -> Call:  # fmt: skip
        prompts = as_list(prompts)
        each = check_params(prompts, params)
        await self._wait_for_welcome()
        call = Call(len(prompts), sum(one.n for one in each), progress, events)
        self._calls.add(call)
        first = self._core.reserve(len(prompts))
        try:
            for position, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                self._add(call, first + position, position, prompt, wanted, tokens)
                if position % BREATH == BREATH - 1:
                    self._flush()
                    await asyncio.sleep(0)
        except BaseException:
            self._finish(call)
            raise
        finally:
            self._core.release(first)
        self._flush_soon()
        return call

    def _add(self, call: Call, number: int, position: int, prompt: Prompt, wanted: SamplingParams, tokens: bool) -> None:
        """Make a request of a prompt; one that cannot be sent ends here, in error samples."""
        error: ErrorInfo | None = None
        kind: wire.PromptKind = "ids"
        data = params = b""
        try:
            kind, data = encode_prompt(prompt)
            params = call.encoded(wanted)
        except ProtocolError as fault:
            error = fault.info()
        request = OpenRequest(
            request_id=number, label=f"{self.session[:8]}-{number}", kind=kind, prompt=data, params=params, n=wanted.n,
            logprobs_mode=wanted.logprobs_mode, seed_base=seed_base(self.seed, str(number), wanted), timeout_s=self._request_timeout_s,
            stream=tokens, sink=call, position=position,
        )  # fmt: skip
        call.requests.append(request)
        self._core.add(request)
        if error is not None:
            self._core.fail([request], error)

    def _finish(self, call: Call) -> None:
        """The caller has what it wanted, or has gone: whatever is still open is cancelled and forgotten."""
        self._calls.discard(call)
        if not call.done.done() or call.done.cancelled() or call.done.exception() is not None:
            self._cancel(call)
            self._core.forget(request.id for request in call.requests)

    def _cancel(self, call: Call) -> None:
        for frames in self._core.cancel(request.id for request in call.requests):
            self._send_frames(frames)

    def _fail_calls(self, error: RolloutError) -> None:
        for call in list(self._calls):
            self._core.forget(request.id for request in call.requests)
            call.fail(error)
        self._calls.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)

    # ---- connection ------------------------------------------------------------------------------------------------------------

    async def _wait_for_welcome(self) -> None:
        if self._closed or self._channel is None:
            raise ClosedError("the client is closed; make a new one" if self._closed else "the client is not connected; use `async with`")
        if self._fault is not None:
            raise self._fault
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._welcomed.wait()
        except TimeoutError:
            raise ConnectError(f"no rollout service answered at {self.url} within {self._connect_timeout_s:g} s") from None
        if self._fault is not None:
            raise self._fault

    def _hello(self) -> None:
        self._greeting = True
        self._send(wire.Hello(version=limits.PROTOCOL_VERSION, session=self.session, name=self._name))

    async def _keep(self) -> None:
        """Ping, notice a silent service, repeat hellos, end what is overdue."""
        while True:
            interval = self._welcome.heartbeat_s if self._welcome is not None else 1.0
            await asyncio.sleep(min(interval, self._service_timeout_s / 4))
            now = self._loop.time()
            if now - self._heard_at > self._service_timeout_s:
                self._lose(ServiceLostError(f"{self.url} was silent for {now - self._heard_at:.1f} s; unfinished requests are lost"))
            if self._welcomed.is_set():
                self._send(wire.Ping(sent=now))
            else:
                self._hello()
            self._core.expire(now)

    def _lose(self, error: RolloutError) -> None:
        """Calls that wait raise; later calls try to connect again."""
        self._welcomed.clear()
        self._fail_calls(error)

    def _receive(self, _: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = _decoder.decode(frames[0].buffer)
            self._heard_at = self._loop.time()
            self._handle(message, frames[1:])
        except ProtocolError as error:
            self._end(ConnectError(f"the service at {self.url} sent something unreadable: {error}"))

    def _handle(self, message: Any, frames: list[zmq.Frame]) -> None:
        match message:
            case wire.Results():
                self._send(self._core.results(message, [frame.buffer for frame in frames]))
                self._flush()
            case wire.Accept():
                self._core.accept(message)
            case wire.Reject():
                self._core.reject(message, self._loop.time())
                self._flush()
            case wire.Welcome():
                self._greet(message)
            case wire.Answer():
                future = self._queries.get(message.call)
                if future is not None and not future.done() and frames:
                    future.set_result(frames[0].bytes)
            case wire.Ping():
                self._send(wire.Pong(sent=message.sent))
            case wire.Bye():
                self._goodbye(message.error)

    def _greet(self, message: wire.Welcome) -> None:
        if message.version != limits.PROTOCOL_VERSION:
            self._end(ConnectError(f"the service speaks protocol version {message.version}, this client {limits.PROTOCOL_VERSION}"))
            return
        fresh = self._greeting
        self._greeting = False
        self._welcome = message
        self.weights_version = message.weights_version
        if message.model is not None:
            self.model = message.model
            self._ready.set()
        for frames in self._core.welcome(message, fresh):
            self._send_frames(frames)
        self._welcomed.set()
        self._flush()

    def _goodbye(self, error: ErrorInfo) -> None:
        if error.code in RESUMABLE:
            if not self._greeting:
                self._welcomed.clear()
                self._hello()
        elif error.code == "service_stopped":
            self._lose(ServiceLostError(error.message, code=error.code))
        else:
            self._end(ConnectError(error.message, code=error.code, retryable=error.retryable))

    def _end(self, error: RolloutError) -> None:
        """The service will not have this client: every call, now and later, raises."""
        self._fault = error
        self._fail_calls(error)
        self._welcomed.set()
        self._ready.set()

    def _trouble(self, _: bytes, result: sockets.SendResult) -> None:
        self._lose(ServiceLostError(f"the connection to {self.url} is {result}"))

    def _flush(self) -> None:
        """Submit what may be submitted."""
        if not self._welcomed.is_set() or self._closed:
            return
        for frames in self._core.outgoing(self._loop.time()):
            self._send_frames(frames)
        wake_at = self._core.wake_at()
        if wake_at is not None and self._flush_due is None:
            self._flush_due = self._loop.call_at(max(wake_at, self._loop.time() + 0.01), self._flush_later)

    def _flush_soon(self) -> None:
        """Submit in this loop's next turn, together with what other calls add until then."""
        if self._flush_due is not None:
            self._flush_due.cancel()
        self._flush_due = self._loop.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self._flush_due = None
        self._flush()

    def _send(self, message: msgspec.Struct) -> None:
        self._send_frames([wire.encode(message)])

    def _send_frames(self, frames: list[Any]) -> None:
        if self._channel is not None and not self._closed and self._channel.send(b"", frames) == "stuck":
            self._lose(ServiceLostError(f"{self.url} does not read what it is sent"))
