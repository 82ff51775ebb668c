"""The client's bookkeeping of requests. In: prompts, the service's messages, the time. Out: frames to send, results. No I/O.

A request stays here until each of its samples has a result, whatever the connection does meanwhile: after a reconnect everything
unfinished is submitted again under the same ids, and the service generates nothing twice.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from batchgen.errors import ErrorInfo
from batchgen.outputs import Group, GroupBuilder, LogprobsMode, Sample
from batchgen.request import sample_seed
from rollout import limits, wire
from rollout.batches import Batch, decode_ids, prompt_length
from rollout.errors import ProtocolError
from rollout.results import abort_sample, error_sample, unpack_progress, unpack_prompt, unpack_sample

LATE_S = 30.0
"""A request that the service has not ended this long after its deadline is ended here."""

Frames = list[Any]


class Sink(Protocol):
    """Where a request's results go."""

    def progress(self, request: "OpenRequest", index: int, start: int, ids: list[int], logprobs: list[float], text: str) -> None: ...
    def sample(self, request: "OpenRequest", sample: Sample, group: Group | None) -> None:
        """One sample; `group` with the last."""


class OpenRequest:
    """A request without all its results."""

    __slots__ = (
        "accepted", "builder", "cancelled", "id", "kind", "n", "params", "position", "prompt", "seed_base", "sent_at", "sink", "stream",
        "timeout_s", "tools",
    )  # fmt: skip

    def __init__(
        self, *, request_id: int, label: str, kind: wire.PromptKind, prompt: bytes, params: bytes, n: int, logprobs_mode: LogprobsMode,
        seed_base: int, timeout_s: float, stream: bool, sink: Sink, position: int, tools: list[dict[str, Any]] | None = None,
    ):  # fmt: skip
        self.id, self.kind, self.prompt, self.params, self.n = request_id, kind, prompt, params, n
        self.seed_base, self.timeout_s, self.stream, self.sink, self.position = seed_base, timeout_s, stream, sink, position
        self.builder = GroupBuilder(label, decode_ids(prompt) if kind == "ids" else [], n, logprobs_mode)
        self.tools = tools
        self.sent_at: float | None = None
        self.accepted = False
        self.cancelled = False


class ClientCore:
    """Open requests, in the order they were made."""

    def __init__(self) -> None:
        self.credits = 0
        """Set by welcome."""
        self.message_format: str | None = None
        """The served model's; set by welcome."""
        self.retries = 0
        """Requests that were sent again after a reject or a reconnect."""
        self._open: dict[int, OpenRequest] = {}
        self._unsent: deque[OpenRequest] = deque()
        self._in_flight = 0
        self._hold_until = 0.0
        self._next_id = 0
        self._lowest = 0
        self._reserved: set[int] = set()
        """First ids of calls that are still adding requests."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def reserve(self, count: int) -> int:
        """The first of `count` ids for a call to add, until it releases them."""
        first, self._next_id = self._next_id, self._next_id + count
        self._reserved.add(first)
        return first

    def release(self, first: int) -> None:
        self._reserved.discard(first)

    def add(self, request: OpenRequest) -> None:
        self._open[request.id] = request
        self._unsent.append(request)

    def outgoing(self, now: float) -> list[Frames]:
        """Submit messages for what may be sent now."""
        messages: list[Frames] = []
        batch, heads = Batch(), list[wire.RequestHead]()
        while self._unsent and self._in_flight < self.credits and now >= self._hold_until:
            request = self._unsent[0]
            if request.id not in self._open:
                self._unsent.popleft()
                continue
            index = batch.add(request.kind, request.prompt, request.params)
            if index is None:
                messages.append([wire.encode(wire.Submit(requests=heads)), *batch.frames()])
                batch, heads = Batch(), []
                continue
            self._unsent.popleft()
            self._in_flight += 1
            request.sent_at = now
            heads.append(
                wire.RequestHead(
                    id=request.id, kind=request.kind, length=prompt_length(request.kind, request.prompt), params=index,
                    seed_base=request.seed_base, timeout_s=request.timeout_s, stream=request.stream,
                )
            )  # fmt: skip
        if heads:
            messages.append([wire.encode(wire.Submit(requests=heads)), *batch.frames()])
        return messages

    def wake_at(self) -> float | None:
        """When held requests may be sent; None when nothing is held back by time."""
        return self._hold_until if self._unsent and self._in_flight < self.credits else None

    # ---- what the service says ---------------------------------------------------------------------------------------------

    def welcome(self, message: wire.Welcome, reconnected: bool) -> list[Frames]:
        """Take the credits; after a (re)connect, queue everything unfinished again. Returns cancels to repeat."""
        self.credits = message.credits
        self.message_format = message.model.message_format if message.model is not None else None
        if not reconnected:
            return []
        again = [request for request in self._open.values() if request.sent_at is not None]
        self.retries += len(again)
        waiting = [request for request in self._unsent if request.sent_at is None]
        self._unsent = deque([*again, *waiting])
        self._in_flight = 0
        self._hold_until = 0.0
        for request in again:
            request.sent_at, request.accepted = None, False
        return self._cancels([request.id for request in again if request.cancelled])

    def accept(self, message: wire.Accept) -> None:
        for request_id in message.requests:
            request = self._open.get(request_id)
            if request is not None:
                request.accepted = True

    def reject(self, message: wire.Reject, now: float) -> None:
        """Retryable: send again later. Otherwise the request's samples are errors."""
        again: list[OpenRequest] = []
        for request_id in message.requests:
            request = self._open.get(request_id)
            if request is None or request.sent_at is None:
                continue
            if message.error.retryable and not request.cancelled and message.error.code != "draining":
                request.sent_at = None
                self._in_flight -= 1
                again.append(request)
            else:
                self.fail([request], message.error)
        if again:
            self.retries += len(again)
            self._unsent.extendleft(reversed(again))
            self._hold_until = now + max(message.retry_after_s, 0.05)

    def results(self, message: wire.Results, bodies: Sequence[Any]) -> wire.Ack:
        """Hand out results; returns the ack to send. ProtocolError when a body is not what its item says."""
        if len(bodies) != len(message.items):
            raise ProtocolError(f"results have {len(message.items)} items and {len(bodies)} bodies")
        for item, body in zip(message.items, bodies, strict=True):
            request = self._open.get(item.request)
            if request is None:
                continue
            match item:
                case wire.SampleItem():
                    sample = unpack_sample(item, body, self.message_format, request.tools)
                    self._give(request, sample, item.cached_tokens)
                case wire.ProgressItem():
                    request.sink.progress(request, item.index, item.start, *unpack_progress(item, body))
                case wire.PromptItem():
                    group = request.builder.group
                    group.prompt_token_ids, logprobs, top = unpack_prompt(item, body)
                    if item.scored:
                        group.prompt_logprobs, group.prompt_top_logprobs = logprobs, top
        return wire.Ack(seq=message.seq, floor=self._floor())

    # ---- ending requests -----------------------------------------------------------------------------------------------------

    def cancel(self, requests: Iterable[int]) -> list[Frames]:
        """End requests: those not sent yet at once, the others by asking the service."""
        ask = []
        for request_id in requests:
            request = self._open.get(request_id)
            if request is None or request.cancelled:
                continue
            request.cancelled = True
            if request.sent_at is None:
                for index in request.builder.absent():
                    self._give(request, abort_sample(index, sample_seed(request.seed_base, index), "cancelled before it was sent"), 0)
            else:
                ask.append(request_id)
        return self._cancels(ask)

    def fail(self, requests: Iterable[OpenRequest], error: ErrorInfo) -> None:
        """Give every missing sample an error."""
        for request in list(requests):
            for index in request.builder.absent():
                self._give(request, error_sample(index, sample_seed(request.seed_base, index), error), 0)

    def forget(self, requests: Iterable[int]) -> None:
        """Drop requests whose caller has gone; their results are ignored."""
        for request_id in requests:
            request = self._open.pop(request_id, None)
            if request is not None and request.sent_at is not None:
                self._in_flight -= 1

    def expire(self, now: float) -> None:
        """End what the service should have ended long ago."""
        late = [r for r in self._open.values() if r.sent_at is not None and now > r.sent_at + r.timeout_s + LATE_S]
        message = "the service gave no result long after the request's deadline; send it again"
        self.fail(late, ErrorInfo(code="deadline", message=message, retryable=True))

    def _give(self, request: OpenRequest, sample: Sample, cached_tokens: int) -> None:
        before = request.builder.missing
        complete = request.builder.add(sample, cached_tokens)
        if request.builder.missing == before:
            return
        if complete:
            del self._open[request.id]
            if request.sent_at is not None:
                self._in_flight -= 1
        request.sink.sample(request, sample, request.builder.group if complete else None)

    def _cancels(self, requests: list[int]) -> list[Frames]:
        step = limits.MAX_IDS_PER_MESSAGE
        return [[wire.encode(wire.Cancel(requests=requests[i : i + step]))] for i in range(0, len(requests), step)]

    def _floor(self) -> int:
        """No id below it is open or will be."""
        end = min(self._reserved, default=self._next_id)
        while self._lowest < end and self._lowest not in self._open:
            self._lowest += 1
        return self._lowest
