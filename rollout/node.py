"""A node: one engine in its thread, one DEALER to the service in the event loop. In: assigned parts. Out: results as they finish.

Knows the wire and the Engine face; never interprets prompts or results.
"""

import asyncio
import logging
import os
import secrets
import socket as host
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from batchgen.errors import BatchGenError, ErrorInfo
from batchgen.events import EngineStats
from batchgen.text.prompts import Prompt
from rollout import limits, sockets, wire
from rollout.batches import Asked, decode_asked, decode_chat, decode_ids, split
from rollout.engine_thread import EngineFactory, EngineThread, Output, Results, Stopped, WeightAnswers
from rollout.errors import ConnectError, ProtocolError, RolloutError
from rollout.samples import expand
from rollout.security import ClientKeys
from weights_sync import messages as weights

log = logging.getLogger("rollout.node")
HELLO_S = 1.0
"""Seconds between hellos while the service does not answer."""
LAG_S = 1.0
POLL_S = 0.02
STOP_S = 10.0
OUTBOX_BYTES = 1024 * 1024 * 1024
_decoder = wire.HeaderDecoder(wire.ToNode)
_weights_decoder = weights.Decoder(weights.ToNode)
FINAL_CODES = ("model_mismatch", "version_mismatch", "forbidden", "too_many_nodes")
"""Reasons for a bye after which saying hello again is pointless."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    """Where a node works and how much it takes."""

    url: str
    """The service's public plane."""
    name: str = ""
    """Shown in health; default host and process id."""
    window: int = 1024
    """Samples wanted outstanding: enough to keep the engine full between two replies."""
    keys: ClientKeys | None = None
    join_timeout_s: float = 60.0
    """Longest wait for a service, at the start and after losing one."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= 1 << 20:
            raise ValueError(f"window is 1 to {1 << 20} samples, got {self.window}")


class Node:
    """`await Node(config, factory).run()` works until stopped. Raises what the factory raised, or ConnectError."""

    def __init__(self, config: NodeConfig, factory: EngineFactory):
        self._config = config
        self._engine = EngineThread(factory, self._from_engine)
        self._outputs: deque[tuple[int, Output]] = deque()
        self._epoch = 0
        self._session = secrets.token_hex(16)
        self._joined = False
        self._timeout_s = 15.0
        self._heard_at = 0.0
        self._lost_at = 0.0
        self._stats: EngineStats | None = None
        self._ending: asyncio.Future[RolloutError | None]
        self._channel: sockets.Channel | None = None
        self._draining = False
        self._busy_at = 0.0
        self.joined = asyncio.Event()
        """Set while the service has taken this node."""

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = self._loop.create_future()
        self._engine.start()
        # Polled, not awaited in a worker thread: a model that loads for minutes must not keep a stopped node alive.
        while not self._engine.ready.is_set():
            if self._ending.done():
                return
            await asyncio.sleep(POLL_S)
        if self._engine.error is not None:
            raise self._engine.error
        context: zmq.Context[Any] = zmq.Context(io_threads=2)
        try:
            socket = sockets.dealer(context, self._config.url, keys=self._config.keys)
            self._channel = sockets.Channel(socket, outbox_bytes=OUTBOX_BYTES, on_message=self._receive, on_trouble=self._trouble)
            self._heard_at = self._lost_at = self._loop.time()
            keeper = asyncio.create_task(self._keep())
            try:
                error = await self._ending
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                self._channel.close()
        finally:
            await asyncio.to_thread(context.term)
            if not await asyncio.to_thread(self._engine.stop, STOP_S):
                log.warning("the engine did not end its step within %g s", STOP_S)
        if error is not None:
            raise error

    def stop(self, reason: str = "the node was stopped") -> None:
        """Leave the service; its unfinished samples go elsewhere. For use in the node's loop."""
        self._end(None, reason)

    def drain(self) -> None:
        """Take no more work, finish what runs, then leave."""
        self._draining = True
        self._busy_at = self._loop.time()
        if self._joined:
            self._send(wire.Drain())
        else:
            self.stop()

    # ---- the service -------------------------------------------------------------------------------------------------------

    def _hello(self) -> None:
        engine = self._engine.engine
        if engine is None:
            return
        hello = wire.NodeHello(
            version=limits.PROTOCOL_VERSION, session=self._session,
            name=self._config.name or f"{host.gethostname()[:64]}-{os.getpid()}", model=engine.facts,
            weights_version=engine.weights_version, window=self._config.window,
        )  # fmt: skip
        self._send(hello)

    async def _keep(self) -> None:
        """Say hello until welcomed; notice a silent service."""
        due = self._loop.time()
        while True:
            now = self._loop.time()
            if now - due > LAG_S:
                self._heard_at = now  # the loop was blocked: the silence meanwhile was ours
            due = now + HELLO_S
            if self._joined and now - self._heard_at > self._timeout_s:
                self._leave("the service was silent")
            if not self._joined:
                if now - self._lost_at > self._config.join_timeout_s:
                    reason = f"no service took this node at {self._config.url} within {self._config.join_timeout_s:g} s"
                    self._end(ConnectError(reason), reason)
                    return
                self._hello()
            if self._draining and self._idle_since_drain(now):
                self.stop("the node is drained")
            await asyncio.sleep(HELLO_S)

    def _idle_since_drain(self, now: float) -> bool:
        """Nothing has run for a while: what the service sent before it read the drain has come and gone."""
        if self._engine.num_parts:
            self._busy_at = now
        return now - self._busy_at > HELLO_S

    def _leave(self, why: str) -> None:
        """The service is gone or forgot us: drop its work and join again."""
        if self._joined:
            log.warning("left the service: %s", why)
            self._lost_at = self._loop.time()
        self._joined = False
        self.joined.clear()
        self._epoch += 1
        self._session = secrets.token_hex(16)
        self._engine.new_epoch(self._epoch)
        if self._channel is not None:
            self._channel.forget(b"")

    def _receive(self, _: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = _decoder.decode(frames[0].buffer)
            self._handle(message, frames[1:])
        except BatchGenError as error:
            log.error("the service sent something unreadable: %s", error)
            self._end(ConnectError(f"the service sent something unreadable: {error}"), "protocol_error")

    def _handle(self, message: Any, frames: list[zmq.Frame]) -> None:
        self._heard_at = self._loop.time()
        match message:
            case wire.Welcome():
                self._timeout_s = message.timeout_s
                if not self._joined:
                    log.info("joined service %s", message.service[:8])
                self._joined = True
                self.joined.set()
                if not message.serving:
                    log.warning("this node's weights are not the service's version %d: no work until an update", message.weights_version)
            case wire.Assign():
                self._assign(message, frames)
            case wire.Abort():
                for part in message.parts:
                    self._engine.abort(part)
            case wire.Control():
                if message.op == "shutdown":
                    self._end(None, "the service told the node to stop")
                else:
                    self._engine.control(message.op)
            case wire.Weights():
                if not 1 <= len(frames) <= 2:
                    raise ProtocolError(f"a weights message has one or two frames, got {len(frames)}")
                word = _weights_decoder.decode(frames[0].buffer)
                self._engine.say_weights(word, frames[1].buffer if len(frames) > 1 else None)
            case wire.Ping():
                self._send(wire.Pong(sent=message.sent, step_age_s=self._engine.step_age_s(), stats=self._stats))
            case wire.Bye():
                log.warning("the service says bye: %s (%s)", message.error.code, message.error.message)
                if message.error.code in FINAL_CODES:
                    self._end(ConnectError(message.error.message, code=message.error.code), "refused")
                elif self._joined:
                    self._leave(message.error.code)
                    if message.error.code != "service_stopped":
                        self._hello()

    def _assign(self, message: wire.Assign, frames: list[zmq.Frame]) -> None:
        encoded, prompts = split(message.parts, [frame.buffer for frame in frames])
        table = [_asked(one) for one in encoded]
        for head, prompt in zip(message.parts, prompts, strict=True):
            asked, indices = table[head.params], expand(head.samples)
            try:
                if isinstance(asked, ErrorInfo):
                    raise ProtocolError(asked.message, code=asked.code)
                self._engine.submit(head.part, _prompt(head.kind, prompt), asked, head.seed_base, indices, head.stream)
            except ProtocolError as error:
                self._engine.refuse(head.part, error.info(), head.seed_base, indices)

    def _trouble(self, _: bytes, result: sockets.SendResult) -> None:
        self._leave(f"the connection is {result}")

    def _send(self, message: msgspec.Struct, frames: list[Any] | None = None) -> None:
        if self._channel is not None and self._channel.send(b"", [wire.encode(message), *(frames or ())]) == "stuck":
            self._leave("the service does not read")

    # ---- the engine --------------------------------------------------------------------------------------------------------

    def _from_engine(self, epoch: int, output: Output) -> None:
        """Called in the engine's thread."""
        self._outputs.append((epoch, output))
        with suppress(RuntimeError):  # the loop is closed: the node has ended without this thread
            self._loop.call_soon_threadsafe(self._forward)

    def _forward(self) -> None:
        results = Results()
        while self._outputs:
            epoch, output = self._outputs.popleft()
            if isinstance(output, EngineStats):
                self._stats = output
            elif isinstance(output, Stopped):
                if output.error is not None:
                    self._end(RolloutError(f"the engine failed: {output.error}", code="engine_failed"), "engine_failed")
            elif epoch != self._epoch:
                continue
            elif isinstance(output, Results):
                results += output
            else:
                self._send_results(results)
                results = Results()
                self._send_weights(output)
        self._send_results(results)

    def _send_results(self, results: Results) -> None:
        start = 0
        while start < len(results):
            stop, header_bytes, body_bytes = start, 0, 0
            while stop < len(results) and stop - start < limits.MAX_ITEMS_PER_RESULTS:
                item, body = results[stop]
                header_bytes += len(msgspec.msgpack.encode(item))
                body_bytes += len(body)
                if stop > start and (header_bytes > limits.TARGET_HEADER_BYTES or body_bytes > limits.TARGET_MESSAGE_BYTES):
                    break
                stop += 1
            batch = results[start:stop]
            self._send(wire.Results(seq=0, items=[item for item, _ in batch]), [body for _, body in batch])
            start = stop

    def _send_weights(self, answers: WeightAnswers) -> None:
        for answer in answers:
            word, bulk = answer if isinstance(answer, tuple) else (answer, None)
            self._send(wire.Weights(), [weights.encode(word)] if bulk is None else [weights.encode(word), bulk])

    def _end(self, error: RolloutError | None, reason: str) -> None:
        if self._ending.done():
            return
        code: Literal["left", "engine_failed"] = "left" if error is None else "engine_failed"
        self._send(wire.Bye(error=ErrorInfo(code=code, message=wire.cut(reason), retryable=True)))
        self._ending.set_result(error)


def _asked(encoded: bytes) -> Asked | ErrorInfo:
    try:
        return decode_asked(encoded)
    except ProtocolError as error:
        return error.info()


def _prompt(kind: wire.PromptKind, prompt: bytes) -> Prompt:
    if kind == "ids":
        return decode_ids(prompt)
    if kind == "chat":
        return decode_chat(prompt)
    try:
        return prompt.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a text prompt is UTF-8: {error}", code="invalid_prompt") from None
