"""Samples to result items and back, and what health and stats answer. In: samples, events, or items and bodies. Out: the other. No torch.

Body layouts are in PROTOCOL.md, "Results". Every size is checked against the item before a byte is read.
Legend: t tokens, k top logprobs per token.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from batchgen.errors import ErrorInfo
from batchgen.events import EngineStats, ModelFacts, PromptScored, SampleFinished, SampleProgress
from batchgen.outputs import Group, Reply, Sample
from rollout import limits
from rollout.errors import ProtocolError
from rollout.wire import ProgressItem, PromptItem, SampleItem, cut

if TYPE_CHECKING:
    import numpy as np

NO_ID = -1


@dataclass(slots=True, kw_only=True)
class Progress:
    """New tokens of a running sample (only from `stream`)."""

    prompt_index: int
    request_id: str
    index: int
    start: int
    token_ids: list[int]
    logprobs: list[float]
    text: str


@dataclass(slots=True, kw_only=True)
class Finished:
    """A sample's result; `group` is set on the last one of its prompt."""

    prompt_index: int
    request_id: str
    sample: Sample
    group: Group | None


class NodeHealth(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One node as the service sees it."""

    name: str
    serving: bool
    """False: joined with other weights, waits for an update."""
    weights_version: int
    outstanding: int
    """Samples assigned and not finished."""
    silent_s: float
    """Seconds since it was last heard."""
    step_age_s: float | None
    """Seconds since its engine finished a step; None when it has nothing to do."""
    engine: EngineStats | None


class Health(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Can the service do work now?"""

    status: str
    """ok | paused | draining | no_nodes | updating"""
    message: str
    model: ModelFacts | None
    weights_version: int
    paused_s: float | None
    """For how long generation has been paused; None when it is not."""
    nodes: list[NodeHealth]
    lost_nodes: list[str]
    """The last few nodes that went away, with the reason."""
    step_age_s: float | None


class ServiceStats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Gauges of now and counters since start."""

    uptime_s: float
    weights_version: int
    clients: int
    nodes: list[NodeHealth]
    queued_requests: int
    """Accepted requests with samples that no node has yet."""
    open_requests: int
    """Accepted requests with unfinished samples."""
    open_bytes: int
    """Bytes of prompts and parameters of open requests."""
    counters: dict[str, int]
    """Every drop, retry and fallback: name → times."""


def pack_sample(request: int, event: SampleFinished, logprobs_mode: str) -> tuple[SampleItem, bytes]:
    """The wire form of a finished sample. A sample that cannot be sent becomes an error sample that says why.

    Of its reply go the marked text and `thinking_open`: the client knows the rest.
    """
    sample = event.sample
    text = sample.text.encode("utf-8", "replace")
    parts = [array("i", sample.token_ids).tobytes(), array("f", sample.logprobs).tobytes()]
    top_k = 0
    if sample.top_logprobs is not None:
        top_k, top = _pack_top(sample.top_logprobs)
        parts += top
    routed: tuple[int, int, int] | None = None
    if sample.routed_experts is not None:
        import numpy as np

        experts = np.ascontiguousarray(sample.routed_experts, dtype="<i2")
        rows, layers, per_token = experts.shape
        routed = (rows, layers, per_token)
        parts.append(experts.tobytes())
    parts.append(text)
    marked = b""
    if sample.reply is not None and sample.reply.text is not None:
        marked = sample.reply.text.encode("utf-8", "replace")
        parts.append(marked)
    body = b"".join(parts)
    if len(body) > limits.MAX_ITEM_BYTES or len(sample.weights_versions) > limits.MAX_SPANS:
        size = f"{len(body)} bytes and {len(sample.weights_versions)} version spans"
        reason = f"the result has {size}, the wire takes {limits.MAX_ITEM_BYTES} and {limits.MAX_SPANS}; ask for fewer tokens"
        failed = error_sample(sample.index, sample.seed, ErrorInfo(code="result_too_large", message=reason))
        return pack_sample(request, SampleFinished(request_id="", sample=failed), logprobs_mode)
    item = SampleItem(
        request=request, index=sample.index, finish_reason=sample.finish_reason, num_tokens=len(sample.token_ids), text_bytes=len(text),
        seed=sample.seed, logprobs_mode="raw" if logprobs_mode == "raw" else "processed", spans=sample.weights_versions,
        stop_match=sample.stop_match, detail=None if sample.detail is None else cut(sample.detail), top_k=top_k, routed=routed,
        cached_tokens=event.num_cached_tokens, error=_cut_error(sample.error), marked_bytes=len(marked),
        thinking_open=sample.reply is not None and sample.reply.thinking_open,
    )  # fmt: skip
    return item, body


def unpack_sample(item: SampleItem, body: Any, message_format: str | None = None, tools: list[dict[str, Any]] | None = None) -> Sample:
    """The Sample again; its message is read in the given format. ProtocolError when the body's size is not what the item says."""
    t, k = item.num_tokens, item.top_k
    routed_bytes = 2 * prod(item.routed) if item.routed else 0
    _expect(body, 8 * t + 8 * t * k + routed_bytes + item.text_bytes + item.marked_bytes, "sample")
    reader = _Reader(body)
    token_ids, logprobs = reader.ints(t), reader.floats(t)
    top = _unpack_top(reader, t, k) if k else None
    routed = reader.experts(item.routed) if item.routed else None
    text, marked = reader.text(item.text_bytes), reader.text(item.marked_bytes) if item.marked_bytes else None
    reply: Reply | None = None
    if message_format is not None and item.error is None:
        reply = Reply(format=message_format, tools=tools, thinking_open=item.thinking_open, text=marked)
    return Sample(
        index=item.index, token_ids=token_ids, logprobs=logprobs, text=text, reply=reply, finish_reason=item.finish_reason,
        stop_match=item.stop_match, detail=item.detail, seed=item.seed, weights_versions=item.spans,
        top_logprobs=top, routed_experts=routed, error=item.error,
    )  # fmt: skip


def pack_progress(request: int, event: SampleProgress) -> tuple[ProgressItem, bytes]:
    text = event.text.encode("utf-8", "replace")
    item = ProgressItem(request=request, index=event.index, start=event.start, num_tokens=len(event.token_ids), text_bytes=len(text))
    return item, array("i", event.token_ids).tobytes() + array("f", event.logprobs).tobytes() + text


def unpack_progress(item: ProgressItem, body: Any) -> tuple[list[int], list[float], str]:
    t = item.num_tokens
    _expect(body, 8 * t + item.text_bytes, "progress")
    reader = _Reader(body)
    return reader.ints(t), reader.floats(t), reader.text(item.text_bytes)


def pack_prompt(request: int, token_ids: Sequence[int], scored: PromptScored | None) -> tuple[PromptItem, bytes]:
    parts = [array("i", token_ids).tobytes()]
    top_k = 0
    if scored is not None:
        logprobs = [float("nan") if value is None else value for value in scored.prompt_logprobs]
        parts.append(array("f", logprobs).tobytes())
        if scored.prompt_top_logprobs is not None:
            top_k, top = _pack_top(scored.prompt_top_logprobs)
            parts += top
    return PromptItem(request=request, num_tokens=len(token_ids), scored=scored is not None, top_k=top_k), b"".join(parts)


def unpack_prompt(item: PromptItem, body: Any) -> tuple[list[int], list[float | None] | None, list[dict[int, float]] | None]:
    """(prompt ids, prompt logprobs, prompt top logprobs); the latter two None unless scored."""
    t, k = item.num_tokens, item.top_k
    _expect(body, 4 * t + (4 * t if item.scored else 0) + 8 * t * k, "prompt")
    reader = _Reader(body)
    token_ids = reader.ints(t)
    if not item.scored:
        return token_ids, None, None
    logprobs = [None if value != value else value for value in reader.floats(t)]
    return token_ids, logprobs, _unpack_top(reader, t, k) if k else None


def error_sample(index: int, seed: int, error: ErrorInfo) -> Sample:
    """A sample that failed before it had tokens."""
    return Sample(
        index=index, token_ids=[], logprobs=[], text="", finish_reason="error", seed=seed, weights_versions=[], error=_cut_error(error)
    )


def abort_sample(index: int, seed: int, detail: str) -> Sample:
    """A sample that was cancelled before it had tokens."""
    return Sample(
        index=index, token_ids=[], logprobs=[], text="", finish_reason="abort", seed=seed, weights_versions=[], detail=cut(detail)
    )


def check_body(item: SampleItem | ProgressItem | PromptItem, body: Any) -> None:
    """ProtocolError when a body's size is not what its item says; for whoever forwards without unpacking."""
    t = item.num_tokens
    if isinstance(item, SampleItem):
        expected = 8 * t + 8 * t * item.top_k + (2 * prod(item.routed) if item.routed else 0) + item.text_bytes + item.marked_bytes
    elif isinstance(item, ProgressItem):
        expected = 8 * t + item.text_bytes
    else:
        expected = 4 * t + (4 * t if item.scored else 0) + 8 * t * item.top_k
    _expect(body, expected, type(item).__name__)


def _cut_error(error: ErrorInfo | None) -> ErrorInfo | None:
    return None if error is None else msgspec.structs.replace(error, message=cut(error.message))


def _expect(body: Any, size: int, what: str) -> None:
    if len(body) != size:
        raise ProtocolError(f"{what} body has {len(body)} bytes, its item describes {size}")
    if size > limits.MAX_ITEM_BYTES:
        raise ProtocolError(f"{what} body has {size} bytes, the limit is {limits.MAX_ITEM_BYTES}")


def _pack_top(rows: list[dict[int, float]]) -> tuple[int, list[bytes]]:
    k = max((len(row) for row in rows), default=0)
    ids, logprobs = array("i"), array("f")
    for row in rows:
        empty = k - len(row)
        ids.extend([*row, *[NO_ID] * empty])
        logprobs.extend([*row.values(), *[0.0] * empty])
    return k, [ids.tobytes(), logprobs.tobytes()]


def _unpack_top(reader: "_Reader", t: int, k: int) -> list[dict[int, float]]:
    ids, logprobs = reader.ints(t * k), reader.floats(t * k)
    rows = range(0, t * k, k)
    return [{i: p for i, p in zip(ids[at : at + k], logprobs[at : at + k], strict=True) if i != NO_ID} for at in rows]


class _Reader:
    """Reads consecutive arrays off one body."""

    def __init__(self, body: Any):
        self._body = memoryview(body).cast("B")
        self._at = 0

    def ints(self, count: int) -> list[int]:
        return self._take(4 * count).cast("i").tolist()

    def floats(self, count: int) -> list[float]:
        return list(self._take(4 * count).cast("f"))

    def experts(self, shape: tuple[int, int, int]) -> "np.ndarray":
        import numpy as np  # only here: a client that asks for no experts starts without it

        return np.frombuffer(self._take(2 * prod(shape)), dtype="<i2").reshape(shape).copy()

    def _take(self, size: int) -> memoryview:
        piece = self._body[self._at : self._at + size]
        self._at += size
        return piece

    def text(self, size: int) -> str:
        return bytes(self._take(size)).decode("utf-8", "replace")
