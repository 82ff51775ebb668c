"""The asyncio client of a rollout service. In: prompts, sampling parameters. Out: groups, events. Imports fast; no torch.

RolloutClient (client_sync.py) is the same client on a background thread.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import zmq

from batchgen.errors import BatchGenError, ErrorInfo
from batchgen.events import ModelFacts
from batchgen.outputs import Group
from batchgen.request import seed_base
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import Prompt, as_list, params_of_each
from rollout import admin_wire, limits, sockets, wire
from rollout.calls import Asks, Call, ProgressCallback, encode_prompt
from rollout.client_admin import AdminConnection
from rollout.client_core import ClientCore, OpenRequest
from rollout.client_link import Link
from rollout.errors import ClosedError, ConnectError, DeadlineError, RolloutError, ServiceLostError
from rollout.results import Finished, Health, Progress, ServiceStats
from rollout.security import ClientKeys

ADMIN_TIMEOUT_S = 30.0
WAIT_SLICE_S = 1.0
BREATH = 1024
"""Prompts encoded before the loop gets a turn: a million of them take longer than a heartbeat."""
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
        self._ready = asyncio.Event()
        self._admin: AdminConnection | None = None
        self._link: Link | None = None
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
        self._link = Link(self, self.url, self._keys, self.session, self._name, self._service_timeout_s)
        try:
            await self._wait_until_up()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leave: the service drops this client's unfinished requests; calls that wait raise ClosedError."""
        link = self._link
        if link is None or link.closed:
            return
        link.say_bye()
        self.on_lost(ClosedError("the client was closed while a call waited"))
        if self._admin is not None:
            self._admin.close()
        await link.close()

    @property
    def _up(self) -> Link:
        """The link. ClosedError before connect."""
        if self._link is None:
            raise ClosedError("the client is not connected; use `async with`")
        return self._link

    async def _wait_until_up(self) -> None:
        await self._up.wait(self._connect_timeout_s)

    async def wait_ready(self, timeout_s: float = 120.0) -> ModelFacts:
        """Wait until the service has a node; returns the model's facts. DeadlineError; ConnectError when the service is lost meanwhile."""
        ends = self._loop.time() + timeout_s
        while self.model is None:
            await self._wait_until_up()
            left = ends - self._loop.time()
            if left <= 0:
                raise DeadlineError(f"no node joined the service at {self.url} within {timeout_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), min(left, WAIT_SLICE_S))
        return self.model

    # ---- generation ------------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *,
        tools: list[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> list[Group]:  # fmt: skip
        """All groups, in the prompts' order. A prompt is a list of token ids, a string, chat messages, or a ChatPrompt.

        `tools` (OpenAI function schemas) and `chat_template_kwargs` (`enable_thinking`, `reasoning_effort`, ...: what the model's
        template reads) are for every chat that brings none of its own; prompts of ids or text fail with them.

        Raises RequestError for tools or kwargs that no chat could have, DeadlineError after timeout_s (everything unfinished is
        cancelled), ServiceLostError, ClosedError.
        """
        call = await self._start(prompts, params, Asks.check(tools, chat_template_kwargs), progress=progress)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            raise DeadlineError(f"the batch was not done within {timeout_s} s; its unfinished requests were cancelled") from None
        finally:
            self._finish(call)

    async def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *,
        tools: list[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, timeout_s: float | None = None,
        tokens: bool = True,
    ) -> AsyncIterator[Progress | Finished]:  # fmt: skip
        """Events as they happen: Progress for new tokens (if `tokens`), Finished for each sample. Leaving the loop cancels the rest."""
        call = await self._start(prompts, params, Asks.check(tools, chat_template_kwargs), events=True, tokens=tokens)
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

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Handle:  # fmt: skip
        """Start one prompt and return at once."""
        call = await self._start([prompt], params, Asks.check(tools, chat_template_kwargs))
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

        return ZmqChannel(sockets.dealer(self._up.context, self.admin_url, keys=self._keys))

    @property
    def admin_url(self) -> str:
        """Given, or learned from the service. ConnectError when it is neither."""
        if self._admin_url is not None:
            return self._admin_url
        welcome = self._link.welcome if self._link is not None else None
        port = welcome.admin_port if welcome is not None else 0
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
        await self._wait_until_up()
        if self._admin is None:
            self._admin = AdminConnection(self._up.context, self.admin_url, self._keys)
        await self._admin.call(message, ADMIN_TIMEOUT_S)

    async def _query(self, what: Literal["health", "stats"], timeout_s: float) -> bytes:
        await self._wait_until_up()
        number, self._next_query = self._next_query, self._next_query + 1
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._queries[number] = future
        self._up.send(wire.Query(call=number, what=what))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise ServiceLostError(f"{self.url} did not tell its {what} within {timeout_s:g} s") from None
        finally:
            self._queries.pop(number, None)

    # ---- calls ---------------------------------------------------------------------------------------------------------------

    async def _start(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None, asks: Asks, *,
        progress: ProgressCallback | None = None, events: bool = False, tokens: bool = False,
    ) -> Call:  # fmt: skip
        prompts = as_list(prompts)
        each = params_of_each(prompts, params)
        await self._wait_until_up()
        call = Call(len(prompts), sum(one.n for one in each), progress, events)
        self._calls.add(call)
        first = self._core.reserve(len(prompts))
        try:
            for position, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                self._add(call, first + position, position, prompt, wanted, asks, tokens)
                if position % BREATH == BREATH - 1:
                    self._flush()
                    await asyncio.sleep(0)
        except BaseException:
            self._finish(call)
            raise
        finally:
            self._core.release(first)
            call.all_added()
        self._flush_soon()
        return call

    def _add(self, call: Call, number: int, position: int, prompt: Prompt, wanted: SamplingParams, asks: Asks, tokens: bool) -> None:
        """Make a request of a prompt; one that cannot be sent ends here, in error samples."""
        error: ErrorInfo | None = None
        kind: wire.PromptKind = "ids"
        tools: list[dict[str, Any]] | None = None
        data = params = b""
        try:
            kind, data = encode_prompt(prompt)
            markers = self.model is None or self.model.message_format is not None
            params, tools = call.entry(wanted, asks, prompt, markers)
        except BatchGenError as fault:
            error = fault.info()
        request = OpenRequest(
            request_id=number, label=f"{self.session[:8]}-{number}", kind=kind, prompt=data, params=params, n=wanted.n,
            logprobs_mode=wanted.logprobs_mode, seed_base=seed_base(self.seed, str(number), wanted), timeout_s=self._request_timeout_s,
            stream=tokens, sink=call, position=position, tools=tools,
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
            self._up.send_frames(frames)

    # ---- what the link tells ---------------------------------------------------------------------------------------------------

    def on_welcome(self, message: wire.Welcome, fresh: bool) -> None:
        """The service knows us: send what is open."""
        self.weights_version = message.weights_version
        if message.model is not None:
            self.model = message.model
            self._ready.set()
        for frames in self._core.welcome(message, fresh):
            self._up.send_frames(frames)
        self._flush()

    def on_message(self, message: Any, frames: list[zmq.Frame]) -> None:
        """Hand a message to whoever waits for it. ProtocolError."""
        match message:
            case wire.Results():
                self._up.send(self._core.results(message, [frame.buffer for frame in frames]))
                self._flush()
            case wire.Accept():
                self._core.accept(message)
            case wire.Reject():
                self._core.reject(message, self._loop.time())
                self._flush()
            case wire.Answer():
                future = self._queries.get(message.call)
                if future is not None and not future.done() and frames:
                    future.set_result(frames[0].bytes)

    def on_lost(self, error: RolloutError) -> None:
        """Calls that wait raise."""
        for call in list(self._calls):
            self._core.forget(request.id for request in call.requests)
            call.fail(error)
        self._calls.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(error)

    def on_beat(self, now: float) -> None:
        """End what is overdue."""
        self._core.expire(now)

    def _flush(self) -> None:
        """Submit what may be submitted."""
        if not self._up.up:
            return
        for frames in self._core.outgoing(self._loop.time()):
            self._up.send_frames(frames)
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
