"""The thread that owns an engine. In: closures to run on it. Out: what the engine reports, handed to a callback. Opens no socket.

The node's event loop posts work here and gets outputs by `emit`, which is called in this thread and must only pass things on.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batchgen.errors import ErrorInfo, RequestError
from batchgen.events import EngineStats, ModelFacts, PromptScored, SampleFinished, SampleProgress, WeightsCommitted
from batchgen.request import Request, sample_seed
from batchgen.text.prompts import Prompt, is_chat, prompt_ids
from batchgen.text.replies import Replies
from rollout.batches import Asked
from rollout.results import error_sample, pack_progress, pack_prompt, pack_sample
from rollout.wire import ResultItem
from weights_sync import messages as weights

log = logging.getLogger("rollout.node")
IDLE_S = 0.5
STATS_S = 0.5
STAGE_SLICE_S = 0.005
"""Time for staging pushed weights between two engine steps."""
STAGE_IDLE_SLICE_S = 0.1


class EngineLike(Protocol):
    """What a node needs of an engine; `batchgen.Engine` is the real one."""

    facts: ModelFacts
    tokenizer: Any
    weights: Any

    @property
    def weights_version(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, sample_indices: Sequence[int] | None = None) -> None: ...
    def abort_all(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def step(self) -> list[Any]: ...
    def stats(self) -> EngineStats: ...
    def commit_weights(self, stage: Any, policy: Any) -> None: ...


EngineFactory = Callable[[], EngineLike]


class Results(list[tuple[ResultItem, bytes]]):
    """Items and bodies for the service, in order."""


class WeightAnswers(list[Any]):
    """Words of weights_sync for the service: messages, or (message, bulk frame)."""


class Stopped:
    """The thread has ended; `error` says why when it was not asked to."""

    def __init__(self, error: str | None):
        self.error = error


Output = Results | WeightAnswers | EngineStats | Stopped


class _Part:
    """One assigned part: how to pack its samples and how many are still to come."""

    __slots__ = ("logprobs_mode", "missing", "part", "prompt", "replies")

    def __init__(self, part: int, logprobs_mode: str, prompt: list[int], missing: int, replies: Replies | None):
        self.part, self.logprobs_mode, self.prompt, self.missing, self.replies = part, logprobs_mode, prompt, missing, replies


class EngineThread:
    """Start with `start()`; `ready` is set when the engine exists or could not be made."""

    def __init__(self, factory: EngineFactory, emit: Callable[[int, Output], None]):
        self._factory = factory
        self._emit = emit
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._parts: dict[str, _Part] = {}
        self._receiver: Any = None
        self._stop = False
        self._epoch = 0
        self._last_step = time.monotonic()
        self._busy = False
        self._out = Results()
        self.ready = threading.Event()
        self.engine: EngineLike | None = None
        self.error: BaseException | None = None
        """Why the engine could not be made."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ask the thread to end after the running step; whether it did in time."""
        self._posts.put(self._set_stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def num_parts(self) -> int:
        """Parts with unfinished samples. May be read from any thread."""
        return len(self._parts)

    def step_age_s(self) -> float | None:
        """Seconds since a step ended while there is work; None when idle. May be read from any thread."""
        return time.monotonic() - self._last_step if self._busy else None

    # ---- posted from the node's loop -------------------------------------------------------------------------------------

    def submit(self, part: int, prompt: Prompt, asked: Asked, seed_base: int, indices: list[int], stream: bool) -> None:
        self._posts.put(lambda: self._submit(part, prompt, asked, seed_base, indices, stream))

    def refuse(self, part: int, error: ErrorInfo, seed_base: int, indices: list[int]) -> None:
        """Error results, in order with the rest."""
        self._posts.put(lambda: self._fail(part, error, seed_base, indices))

    def abort(self, part: int) -> None:
        self._posts.put(lambda: self._need().abort(self._name(part)))

    def control(self, op: str) -> None:
        """pause, resume or abort_all."""
        self._posts.put(lambda: getattr(self._need(), {"pause": "pause", "resume": "resume", "abort_all": "abort_all"}[op])())

    def say_weights(self, word: weights.ToNode, data: Any) -> None:
        self._posts.put(lambda: self._answer(self._weights().handle(word, data)))

    def new_epoch(self, epoch: int) -> None:
        """The service was lost: abort everything; what belongs to earlier epochs is never reported."""
        self._posts.put(lambda: self._begin_epoch(epoch))

    # ---- in the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.engine = self._factory()
        except BaseException as error:
            self.error = error
            self.ready.set()
            return
        self.ready.set()
        error_text: str | None = None
        try:
            while not self._stop:
                self._turn(self.engine)
        except Exception as error:
            log.exception("the engine failed")
            error_text = f"{type(error).__name__}: {error}"
        self._busy = False
        self._emit(self._epoch, Stopped(error_text))

    def _turn(self, engine: EngineLike) -> None:
        receiver = self._receiver
        staging = receiver is not None and receiver.has_work
        if not (engine.has_work or staging):
            self._set_busy(False)
            self._report_stats(engine)
            self._take(block=True)
        self._take(block=False)
        if engine.has_work:
            self._set_busy(True)
            events = engine.step()
            self._last_step = time.monotonic()
            if events:
                self._events(events)
        receiver = self._receiver
        if receiver is not None:
            if receiver.has_work:
                self._answer(receiver.work(STAGE_SLICE_S if engine.has_work else STAGE_IDLE_SLICE_S))
            else:
                self._answer(receiver.expire())
        self._flush()
        self._report_stats(engine, STATS_S)

    def _set_busy(self, busy: bool) -> None:
        if busy and not self._busy:
            self._last_step = time.monotonic()
        self._busy = busy

    _stats_at = 0.0

    def _report_stats(self, engine: EngineLike, interval_s: float = 0.0) -> None:
        if (now := time.monotonic()) >= self._stats_at + interval_s:
            self._stats_at = now
            self._emit(self._epoch, _copy(engine.stats()))

    def _take(self, block: bool) -> None:
        """Run what was posted; when blocking, wait for the first for a while."""
        try:
            self._posts.get(block, IDLE_S if block else None)()
            while True:
                self._posts.get_nowait()()
        except queue.Empty:
            pass
        self._flush()

    def _submit(self, part: int, prompt: Prompt, asked: Asked, seed_base: int, indices: list[int], stream: bool) -> None:
        engine, params = self._need(), asked.params
        try:
            token_ids = self._token_ids(prompt, asked)
            if isinstance(prompt, str) or is_chat(prompt):
                self._out.append(pack_prompt(part, token_ids, None))
            engine.submit(
                Request(
                    request_id=self._name(part), prompt_token_ids=token_ids, params=params, sample_indices=indices, seed_base=seed_base,
                    stream=stream,
                )
            )  # fmt: skip
        except RequestError as error:
            self._fail(part, error.info(), seed_base, indices)
            return
        replies = Replies(engine.tokenizer, token_ids) if asked.markers else None
        self._parts[self._name(part)] = _Part(part, params.logprobs_mode, token_ids, len(indices), replies)

    def _token_ids(self, prompt: Prompt, asked: Asked) -> list[int]:
        try:
            return prompt_ids(self._need().tokenizer, prompt, asked.tools, asked.template_kwargs)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"the prompt could not be tokenised: {type(error).__name__}: {error}", code="invalid_prompt") from None

    def _fail(self, part: int, error: ErrorInfo, seed_base: int, indices: list[int]) -> None:
        for index in indices:
            sample = error_sample(index, sample_seed(seed_base, index), error)
            self._out.append(pack_sample(part, SampleFinished(request_id="", sample=sample), "processed"))

    def _events(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, WeightsCommitted):
                if self._receiver is not None:
                    self._answer(self._receiver.committed(event.version, event.paused_s))
                self._report_stats(self._need())
                continue
            part = self._parts.get(event.request_id)
            if part is None:
                continue
            match event:
                case SampleFinished():
                    if part.replies is not None:
                        part.replies.attach(event.sample)
                    self._out.append(pack_sample(part.part, event, part.logprobs_mode))
                    part.missing -= 1
                    if not part.missing:
                        del self._parts[event.request_id]
                case SampleProgress():
                    self._out.append(pack_progress(part.part, event))
                case PromptScored():
                    self._out.append(pack_prompt(part.part, part.prompt, event))

    def _answer(self, answers: Sequence[Any]) -> None:
        if answers:
            self._flush()  # results sampled before an answer reach the service before it
            self._emit(self._epoch, WeightAnswers(answers))

    def _flush(self) -> None:
        if self._out:
            out, self._out = self._out, Results()
            self._emit(self._epoch, out)

    def _weights(self) -> Any:
        if self._receiver is None:
            from weights_sync.receiver import WeightReceiver

            engine = self._need()
            self._receiver = WeightReceiver(engine.weights, engine.commit_weights)
        return self._receiver

    def _begin_epoch(self, epoch: int) -> None:
        self._flush()
        self._epoch = epoch
        self._parts.clear()
        engine = self._need()
        engine.abort_all()
        engine.resume()
        if self._receiver is not None:
            self._receiver.reset()

    def _name(self, part: int) -> str:
        return f"{self._epoch}-{part}"

    def _need(self) -> EngineLike:
        if self.engine is None:
            raise RuntimeError("the engine does not exist yet")
        return self.engine

    def _set_stop(self) -> None:
        self._stop = True


def _copy(stats: EngineStats) -> EngineStats:
    """A snapshot: the engine may go on counting in its own object."""
    import copy

    return copy.copy(stats)
