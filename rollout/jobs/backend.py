"""Who generates a job's rows. In: a prompt and its sampling. Out: a Group. Never touches a file."""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.errors import RequestError
from batchgen.events import Event, ModelFacts, PromptScored, SampleFinished
from batchgen.outputs import Group, GroupBuilder
from batchgen.request import Request
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import tools_of
from batchgen.text.replies import Replies
from rollout.jobs.batch_file import Prompt
from rollout.jobs.errors import BackendLost

if TYPE_CHECKING:
    from batchgen.llm import LLM


class Backend(Protocol):
    """What a job needs. `params.seed` is always set."""

    async def start(self) -> ModelFacts:
        """Connect or load; returns what is served. Raises BatchGenError."""

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Group:
        """All samples of one row. Cancelling drops the work. Raises BackendLost when no row can succeed, BatchGenError for this row."""

    async def close(self) -> None:
        """Drop what is in flight and let go of everything."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """One row on its way through the engine thread."""

    prompt: Prompt
    params: SamplingParams
    future: "asyncio.Future[Group]"
    request_id: str = field(default="")
    builder: GroupBuilder | None = None
    replies: Replies | None = None
    cancelled: bool = False


class EmbeddedBackend:
    """An engine in a thread of this process. Rows are admitted while others decode and come back as each finishes."""

    def __init__(self, make_llm: "Callable[[], LLM]"):
        self._make_llm = make_llm
        self._inbox: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lost: BackendLost | None = None

    async def start(self) -> ModelFacts:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[ModelFacts] = loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(loop, ready), name="job-engine", daemon=True)
        self._thread.start()
        return await ready

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Group:
        if self._lost is not None:
            raise self._lost
        ticket = _Ticket(prompt, params, asyncio.get_running_loop().create_future())
        self._inbox.put(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            ticket.cancelled = True
            self._inbox.put(ticket)
            raise

    async def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    def _main(self, loop: asyncio.AbstractEventLoop, ready: "asyncio.Future[ModelFacts]") -> None:
        """The engine's thread: the only one that touches it."""
        try:
            llm = self._make_llm()
        except Exception as error:
            loop.call_soon_threadsafe(_settle, [(ready, error)])
            return
        loop.call_soon_threadsafe(_settle, [(ready, llm.engine.facts)])
        running: dict[str, _Ticket] = {}
        try:
            self._serve(llm, running, loop)
        except Exception as error:
            self._lost = BackendLost(f"the engine failed: {type(error).__name__}: {error}; rows done so far are kept")
            self._lost.__cause__ = error
            waiting = [*running.values(), *iter(self._next_waiting, None)]
            loop.call_soon_threadsafe(_settle, [(ticket.future, self._lost) for ticket in waiting])

    def _next_waiting(self) -> _Ticket | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _serve(self, llm: "LLM", running: dict[str, _Ticket], loop: asyncio.AbstractEventLoop) -> None:
        ids = count()
        while True:
            settled: list[tuple[asyncio.Future[Any], Any]] = []
            try:
                ticket = self._inbox.get(block=not llm.engine.has_work)
                while ticket is not None:
                    if ticket.cancelled:
                        running.pop(ticket.request_id, None)
                        llm.engine.abort(ticket.request_id)
                    else:
                        ticket.request_id = str(next(ids))
                        _admit(llm, ticket, running, settled)
                    ticket = self._inbox.get_nowait()
                return
            except queue.Empty:
                pass
            if llm.engine.has_work:
                for event in llm.engine.step():
                    _deliver(event, running, settled)
            if settled:
                loop.call_soon_threadsafe(_settle, settled)


def _admit(llm: "LLM", ticket: _Ticket, running: dict[str, _Ticket], settled: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    params = ticket.params
    assert params.seed is not None
    try:
        ids = llm.encode(ticket.prompt)
        llm.engine.submit(
            Request(
                request_id=ticket.request_id,
                prompt_token_ids=ids,
                params=params,
                sample_indices=list(range(params.n)),
                seed_base=params.seed,
            )
        )
    except RequestError as error:
        settled.append((ticket.future, error))
        return
    ticket.builder = GroupBuilder(ticket.request_id, ids, params.n, params.logprobs_mode)
    ticket.replies = Replies(llm.engine.tokenizer, ids, tools_of(ticket.prompt, None))
    running[ticket.request_id] = ticket


def _deliver(event: Event, running: dict[str, _Ticket], settled: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    if not isinstance(event, SampleFinished | PromptScored) or (ticket := running.get(event.request_id)) is None:
        return
    builder, replies = ticket.builder, ticket.replies
    assert builder is not None and replies is not None
    if isinstance(event, PromptScored):
        builder.group.prompt_logprobs, builder.group.prompt_top_logprobs = event.prompt_logprobs, event.prompt_top_logprobs
        return
    replies.attach(event.sample)
    if builder.add(event.sample, event.num_cached_tokens):
        del running[event.request_id]
        settled.append((ticket.future, builder.group))


def _settle(results: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    for future, result in results:
        if not future.done():
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
