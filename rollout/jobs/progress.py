"""How far a job is. In: result rows as they are written. Out: counters, a line to show, and the summary. Never touches a file."""

import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TextIO

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from rollout.jobs.results import ResultRow


class Summary(msgspec.Struct, kw_only=True):
    """The last line `rollout run` prints, as JSON."""

    status: str
    """completed, interrupted, or the code of the error that stopped the job."""
    exit_code: int
    message: str | None
    """What stopped the job and what to do."""
    output: str
    failed_output: str | None
    """Input lines of the failed rows, ready to be an input again; null when there are none."""
    rows: dict[str, int]
    """total, succeeded, failed, remaining; of these cached (from an earlier run) and reused (`--dedupe exact`)."""
    finish_reasons: dict[str, int]
    """Samples by finish_reason; `length` are cut off."""
    errors: dict[str, int]
    """Failed rows by error code."""
    tokens: dict[str, int]
    """prompt, cached_prompt, completion over all rows; completion_this_run."""
    weights_versions: dict[int, int]
    """Output tokens by the weights version that sampled them."""
    retries: int
    duplicates: int
    """Rows with the prompt and sampling of an earlier row."""
    seconds: float
    tokens_per_s: float
    """Output tokens of this run over its time."""
    latency_s: dict[str, float]
    """Percentiles of this run's rows, from start to result: p50, p90, p99, max."""


class Counters:
    """Everything a job counts."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self.total = total
        self.succeeded = self.failed = self.cached = self.reused = self.retries = 0
        self.begun = self.failed_now = 0
        """Rows of this run that were begun, and those of them that failed."""
        self.finish_reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.weights_versions: Counter[int] = Counter()
        self.prompt_tokens = self.cached_prompt_tokens = self.completion_tokens = self.completion_tokens_now = 0
        self._latencies = array("f")
        self._clock = clock
        self._started_at = clock()

    @property
    def done(self) -> int:
        return self.succeeded + self.failed

    @property
    def seconds(self) -> float:
        return self._clock() - self._started_at

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens_now / max(self.seconds, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at this run's rate of rows; None before the first."""
        rate = (self.done - self.cached) / max(self.seconds, 1e-9)
        return (self.total - self.done) / rate if rate else None

    def add(self, row: ResultRow, *, cached: bool = False) -> None:
        """Count a row of this run, or one that was found in the output."""
        if row.error is None:
            self.succeeded += 1
        else:
            self.failed += 1
            self.errors[row.error.code] += 1
            self.failed_now += not cached
        self.cached += cached
        reused = row.provenance.reused_from is not None
        self.reused += reused
        if not cached and not reused and row.provenance.seconds is not None:
            self._latencies.append(row.provenance.seconds)
        if row.response is None:
            return
        body = row.response.body
        self.prompt_tokens += body.usage.prompt_tokens
        self.cached_prompt_tokens += body.usage.cached_prompt_tokens
        self.completion_tokens += body.usage.completion_tokens
        if not cached and not reused:
            self.completion_tokens_now += body.usage.completion_tokens
        for choice in body.choices:
            self.finish_reasons[choice.finish_reason] += 1
            for version, start, end in choice.weights_versions:
                self.weights_versions[version] += end - start

    def latency_s(self) -> dict[str, float]:
        if not self._latencies:
            return {}
        p50, p90, p99, top = np.percentile(np.frombuffer(self._latencies, dtype=np.float32), [50, 90, 99, 100])
        return {"p50": round(float(p50), 3), "p90": round(float(p90), 3), "p99": round(float(p99), 3), "max": round(float(top), 3)}

    def line(self) -> str:
        """One line for a log."""
        eta = "?" if self.eta_s is None else f"{self.eta_s:.0f} s"
        cut = self.finish_reasons["length"]
        return (
            f"{self.done}/{self.total} rows  failed {self.failed}  cached {self.cached}  "
            f"{self.tokens_per_s:.0f} tok/s  cut off {cut}  ETA {eta}"
        )


def summarise(
    counters: Counters, *, status: str, exit_code: int, message: str | None, output: str, failed_output: str | None, duplicates: int
) -> Summary:
    """The counters as the JSON that ends a run."""
    return Summary(
        status=status,
        exit_code=exit_code,
        message=message,
        output=output,
        failed_output=failed_output,
        rows={
            "total": counters.total,
            "succeeded": counters.succeeded,
            "failed": counters.failed,
            "remaining": counters.total - counters.done,
            "cached": counters.cached,
            "reused": counters.reused,
        },
        finish_reasons=dict(counters.finish_reasons),
        errors=dict(counters.errors),
        tokens={
            "prompt": counters.prompt_tokens,
            "cached_prompt": counters.cached_prompt_tokens,
            "completion": counters.completion_tokens,
            "completion_this_run": counters.completion_tokens_now,
        },
        weights_versions=dict(sorted(counters.weights_versions.items())),
        retries=counters.retries,
        duplicates=duplicates,
        seconds=round(counters.seconds, 3),
        tokens_per_s=round(counters.tokens_per_s, 1),
        latency_s=counters.latency_s(),
    )


class Reporter(Protocol):
    """Shows a running job."""

    def update(self, counters: Counters) -> None:
        """Called often; decides itself how often to draw."""

    def note(self, text: str) -> None:
        """Something the user should read."""

    def close(self, counters: Counters) -> None:
        """Draw the last state and let go of the terminal."""


class PlainReporter:
    """A line every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO, interval_s: float = 5.0, clock: Callable[[], float] = time.monotonic):
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._shown_at = clock()

    def update(self, counters: Counters) -> None:
        if self._clock() - self._shown_at >= self._interval_s:
            self.note(counters.line())

    def note(self, text: str) -> None:
        self._shown_at = self._clock()
        print(text, file=self._stream, flush=True)

    def close(self, counters: Counters) -> None:
        self.note(counters.line())


class BarReporter:
    """A bar on a terminal."""

    def __init__(self, console: Console):
        self._console = console
        self._bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), console=console)
        self._task: TaskID | None = None

    def update(self, counters: Counters) -> None:
        if self._task is None:
            self._task = self._bar.add_task("rows", total=counters.total, state="")
            self._bar.start()
        _, _, state = counters.line().partition(" rows  ")
        self._bar.update(self._task, completed=counters.done, state=state)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self, counters: Counters) -> None:
        self.update(counters)
        self._bar.stop()


def default_reporter() -> Reporter:
    """A bar when stderr is a terminal, else lines."""
    return BarReporter(Console(stderr=True)) if sys.stderr.isatty() else PlainReporter(sys.stderr)
