"""What to do next. In: a snapshot of sequences and pages. Out: a StepPlan. A pure function: no torch, no clock, no sockets.

Order of precedence: running sequences get the pages for their next tokens; when pages run short the youngest work yields them;
then prefills under way go on, prompts that are ready start their samples, and waiting work is admitted, oldest first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RunningView:
    """A sequence with KV on the device. In admission order: the last is the youngest."""

    id: int
    num_tokens: int
    """Tokens known; the KV of all but the last is stored."""
    num_pages: int
    num_own_pages: int
    """Pages that become available when it yields."""
    remaining: int
    """Tokens it may still generate."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prompt or resumption. Resident ones hold pages already; waiting ones need `new_pages`."""

    id: int
    num_left: int
    """Tokens still to compute."""
    max_chunk: int
    """Most tokens of it in one step."""
    new_pages: int
    num_own_pages: int
    num_starts: int
    """Slots that it will take once computed."""
    is_resumption: bool


@dataclass(frozen=True, slots=True)
class ReadyView:
    """A computed prompt whose samples can start."""

    id: int
    num_tokens: int
    num_unstarted: int
    num_own_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    running: Sequence[RunningView]
    prefilling: Sequence[PrefillView]
    ready: Sequence[ReadyView]
    waiting: Iterable[PrefillView]
    """Read lazily, oldest first, resumptions before prompts."""
    num_available_pages: int
    num_available_places: float = math.inf
    """Of states: a prefill takes one, and each sample it starts but the last."""
    admitting: bool = True
    """False while a weight update waits for running sequences: nothing new starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    decision_interval: int


@dataclass(slots=True)
class StepPlan:
    """Carried out in the order of the fields."""

    yielded: list[int] = field(default_factory=list)
    """Running sequences that give up their pages."""
    dropped: list[int] = field(default_factory=list)
    """Prefilling or ready prompts that give up their pages and wait again."""
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(ready prompt, how many of its samples start now)."""
    admitted: list[int] = field(default_factory=list)
    """Waiting prefills that get their pages."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(prefill, tokens to compute in the first forward pass)."""
    num_steps: int = 0
    """Forward passes before the next plan."""
    stop_below: int = 0
    """End the run early once fewer sequences than this are alive."""


def plan(state: SchedulerState, limits: Limits) -> StepPlan:
    """The next step, from nothing but the snapshot."""
    out = StepPlan()
    running, prefilling, ready = list(state.running), list(state.prefilling), list(state.ready)
    pages, places = state.num_available_pages, state.num_available_places
    steps = 1 if prefilling else limits.decision_interval
    if _growths(running, steps, limits) > pages:
        steps = 1
    while _growths(running, steps, limits) > pages and (ready or prefilling or len(running) > 1):
        if ready or prefilling:
            victim: ReadyView | PrefillView = ready.pop() if ready else prefilling.pop()
            out.dropped.append(victim.id)
            pages += victim.num_own_pages
        else:
            youngest = running.pop()
            out.yielded.append(youngest.id)
            pages += youngest.num_own_pages
    pages -= _growths(running, steps, limits)
    short = bool(out.yielded or out.dropped)

    num_live = len(running)
    committed = num_live + sum(view.num_starts for view in prefilling) + sum(view.num_unstarted for view in ready)
    if state.admitting and not short:
        if num_live == 0 and ready and _start_cost(ready[0], steps, limits) > pages:
            steps = 1  # else it would wait for pages that nobody gives back
        for prompt in ready:
            cost = _start_cost(prompt, steps, limits)
            count = min(prompt.num_unstarted, limits.max_num_seqs - num_live, (pages - num_live) // cost)
            if num_live == 0 and pages >= cost:
                count = max(count, 1)
            if count > places:  # the last sample takes over its prompt's
                count = int(places) + (prompt.num_unstarted == places + 1)
            if count > 0:
                places -= count - (count == prompt.num_unstarted)
                out.starts.append((prompt.id, count))
                num_live += count
                pages -= count * cost

    budget = max(limits.max_num_batched_tokens - num_live, limits.page_size)
    for job in prefilling:
        budget -= _take(out, job, budget)
    backlog = False
    for job in () if short else state.waiting:
        if not (job.is_resumption or state.admitting):
            continue
        backlog = True
        reserve = num_live + 1 if committed else 0
        if budget <= 0 or committed >= limits.max_num_seqs or pages - job.new_pages < reserve or not places:
            break
        backlog = False
        out.admitted.append(job.id)
        committed += job.num_starts
        pages -= job.new_pages
        places -= 1
        budget -= _take(out, job, budget)
    if out.chunks or short:
        steps = 1
    out.num_steps = steps if num_live or out.chunks else 0
    if backlog or sum(view.num_unstarted for view in ready) > sum(count for _, count in out.starts):
        out.stop_below = num_live - num_live // 8
    if not out.num_steps and not short:
        out.dropped = [prompt.id for prompt in (ready[1:] if state.admitting else ready)]
    return out


def _start_cost(prompt: ReadyView, num_steps: int, limits: Limits) -> int:
    """Pages that a sample takes beside the full ones of its prompt."""
    return -(-(prompt.num_tokens + num_steps) // limits.page_size) - prompt.num_tokens // limits.page_size


def _growths(running: Sequence[RunningView], steps: int, limits: Limits) -> int:
    return sum(_growth(view, steps, limits.page_size) for view in running)


def _growth(view: RunningView, steps: int, page_size: int) -> int:
    """Pages a sequence lacks for its next `steps` tokens."""
    stored = view.num_tokens - 1 + min(steps, view.remaining)
    return max(0, -(-stored // page_size) - view.num_pages)


def _take(out: StepPlan, job: PrefillView, budget: int) -> int:
    tokens = min(job.num_left, job.max_chunk, budget)
    if tokens > 0:
        out.chunks.append((job.id, tokens))
    return max(0, tokens)
