"""Prompts and sequences: the coroutines the runtime drives. In: events. Out: needs. No tensors are computed here.

    WAITING → PREFILL → READY ⇄ DECODE → FINISHED(stop | length | abort | error)

A Prompt owns the prefill that all its samples share. A Sequence is one sample; it starts when its prompt is ready and is a
coroutine: it yields what it needs next (`Need`) and is resumed with what happened (`Resume`).
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from batchgen.errors import ErrorInfo
from batchgen.kv_pages import PrefixKey
from batchgen.outputs import FinishReason, Sample
from batchgen.request import Request
from batchgen.text.stream import TextStream

NO_PLACE = -1


class Need(Enum):
    """What a sequence cannot go on without."""

    PREFIX = "prefix"
    """KV of every token but the last on the device."""
    DECODE = "decode"
    """A decode run from its last token."""


class State(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    READY = "ready"
    DECODE = "decode"
    HELD = "held"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Prefill:
    """Token ids whose KV is being brought onto the device, page by page."""

    id: int
    token_ids: list[int]
    keys: list[PrefixKey]
    pages: list[int] = field(default_factory=list)
    place: int = NO_PLACE
    """Of its state among the cache's."""
    num_computed: int = 0
    num_cached: int = 0
    state: State = State.WAITING

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass(slots=True, eq=False)
class Prompt(Prefill):
    """A prompt and the samples that still have to start from it."""

    unstarted: deque[tuple[Request, int]] = field(default_factory=deque)
    merge_key: object = None
    """Requests with an equal key share this prompt."""
    want_routed: bool = False
    scored_by: Request | None = None
    """The request whose prompt logprobs are computed along the way; such a prompt is never shared or cached."""
    logits_V: Any = None
    """Logits of the last prompt token, once the state is READY."""
    routed: list[np.ndarray] = field(default_factory=list)
    score_logprobs: list[float | None] = field(default_factory=lambda: [None])
    score_tops: list[dict[int, float]] = field(default_factory=lambda: [{}])


@dataclass(slots=True, eq=False)
class Resumption(Prefill):
    """Recomputes a yielded sequence's KV."""

    sequence: "Sequence" = None  # type: ignore[assignment]


@dataclass(slots=True, kw_only=True)
class Decoded:
    """Tokens a run sampled for one sequence, all by one weights version."""

    token_ids: list[int]
    logprobs: list[float]
    tops: list[dict[int, float]] | None = None
    routed: np.ndarray | None = None
    version: int
    reason: FinishReason | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True, kw_only=True)
class PagesReleased:
    """The sequence lost its device pages; its tokens stay."""


@dataclass(slots=True, kw_only=True)
class PrefixComputed:
    """KV of all tokens but the last is on the device again, in these pages, and the state they lead to in this place."""

    pages: list[int]
    place: int = NO_PLACE


@dataclass(slots=True, kw_only=True)
class Finish:
    """The sequence ends now, whatever it was doing."""

    reason: FinishReason
    error: ErrorInfo | None = None


Resume = Decoded | PagesReleased | PrefixComputed | Finish


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample being generated."""

    id: int
    request: Request
    index: int
    seed: int
    max_outputs: int
    detail: str | None
    num_cached: int
    stop_token_ids: frozenset[int]
    pages: list[int]
    prompt_keys: list[PrefixKey]
    """Keys of the prompt's full pages."""
    num_computed: int
    place: int = NO_PLACE
    slot: int = -1
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] | None = None
    routed: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    stream: TextStream | None = None
    new_text: str = ""
    """Text that became certain since it was last taken."""
    num_reported: int = 0
    """Output tokens already sent as progress."""
    state: State = State.READY
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    error: ErrorInfo | None = None
    coroutine: Generator[Need, Resume, None] = None  # type: ignore[assignment]

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_ids)

    def run(self) -> Generator[Need, Resume, None]:
        """The coroutine: yields needs until the sample has its finish reason."""
        while self.finish_reason is None:
            if self.num_computed < self.num_tokens - 1:
                self.state = State.WAITING
                event = yield Need.PREFIX
            else:
                self.state = State.DECODE if self.slot >= 0 else State.READY
                event = yield Need.DECODE
            match event:
                case Decoded():
                    self._extend(event)
                case PagesReleased():
                    self.num_computed, self.pages, self.place = 0, [], NO_PLACE
                case PrefixComputed():
                    self.num_computed, self.pages, self.place = self.num_tokens - 1, event.pages, event.place
                case Finish():
                    self.finish_reason, self.error = event.reason, event.error
        self.state = State.FINISHED

    def _extend(self, event: Decoded) -> None:
        count = len(event.token_ids)
        if self.stream is not None:
            hide_last = event.reason == "stop" and not self.request.params.include_stop
            update = self.stream.push(event.token_ids[:-1] if hide_last else event.token_ids)
            self.new_text += update.text
            if update.stop_match is not None:
                assert update.num_tokens is not None
                count = update.num_tokens - len(self.output_ids)
                self.finish_reason, self.stop_match = "stop", update.stop_match
        start = len(self.output_ids)
        self.output_ids += event.token_ids[:count]
        self.logprobs += event.logprobs[:count]
        if event.tops is not None:
            self.tops = (self.tops or []) + event.tops[:count]
        if event.routed is not None:
            self.routed.append(event.routed[:count])
        if count:
            self._stamp(event.version, start, start + count)
        self.num_computed = self.num_tokens - 1
        if self.finish_reason is None and event.reason is not None:
            self.finish_reason, self.error = event.reason, event.error
            if event.reason == "stop":
                self.stop_match = self.output_ids[-1]

    def _stamp(self, version: int, start: int, end: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], end)
        else:
            self.spans.append((version, start, end))

    def sample(self, text: str) -> Sample:
        """The finished sequence as a result."""
        assert self.finish_reason is not None
        routed = np.concatenate(self.routed)[: self.num_tokens - 1] if self.routed else None
        return Sample(
            index=self.index,
            token_ids=self.output_ids,
            logprobs=self.logprobs,
            text=text,
            finish_reason=self.finish_reason,
            stop_match=self.stop_match,
            detail=self.detail if self.finish_reason == "length" else None,
            seed=self.seed,
            weights_versions=self.spans,
            top_logprobs=self.tops,
            routed_experts=routed,
            error=self.error,
        )
