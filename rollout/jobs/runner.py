"""Runs a job. In: a JobConfig and a Backend. Out: the output file and a Summary. Holds a window of rows, never the whole file."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version

import msgspec
import numpy as np

from batchgen.errors import BatchGenError, ErrorInfo
from batchgen.events import ModelFacts
from batchgen.request import seed_base
from rollout.jobs.backend import Backend
from rollout.jobs.batch_file import BadRow, BatchFile, Row, check_input, parse_line, with_id
from rollout.jobs.config import JobConfig
from rollout.jobs.errors import BackendLost, JobInterrupted, JobRefused, JobStopped, JobWriteError, TooManyFailures
from rollout.jobs.journal import Journal, replace_file
from rollout.jobs.progress import Counters, Reporter, Summary, summarise
from rollout.jobs.results import ResultRow, failed_row, result_row, reused_row
from rollout.jobs.resume import Manifest, check_paths, check_same, locked, read_manifest, sibling, write_manifest
from rollout.jobs.sampling_fields import canonical, wishes
from rollout.jobs.scan import scan

MIN_ROWS_FOR_RATE = 200
"""Rows begun before the error rate means anything."""
TICK_S = 0.5


class Job:
    """One run. `interrupt` may be called from the event loop at any time."""

    def __init__(
        self,
        config: JobConfig,
        backend: Backend,
        reporter: Reporter,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._config = config
        self._backend = backend
        self._reporter = reporter
        self._clock = clock
        self._wall_clock = wall_clock
        self._engine_version = version("batchgen")
        self._tasks: set[asyncio.Task[None]] = set()
        self._samples_in_flight = 0
        self._wake = asyncio.Event()
        self._interrupted = False
        self._failure: BaseException | None = None

    def interrupt(self) -> None:
        """Stop soon: finished rows are kept, rows in flight are dropped."""
        self._interrupted = True
        self._wake.set()

    async def run(self) -> Summary:
        """Do every row that has no result yet. Raises JobRefused, before any work, and any BatchGenError of the backend's start."""
        config = self._config
        check_input(config.input_path)
        check_paths(config.input_path, config.output_path)
        try:
            self._defaults = canonical(config.sampling)
            wishes(self._defaults, {})
        except ValueError as error:
            raise JobRefused(f"command-line sampling: {error}") from None
        with locked(config.output_path):
            self._file = BatchFile(config.input_path)
            self._scan = scan(self._file, self._defaults)
            self._reporter.note(self._scan.describe(config.input_path, reuse=config.dedupe == "exact"))
            manifest = Manifest(
                input_digest=self._scan.digest,
                num_rows=self._scan.num_rows,
                engine_version=self._engine_version,
                seed=config.seed,
                dedupe=config.dedupe,
                sampling=self._defaults,
            )
            earlier = read_manifest(config.output_path, config.resume)
            if earlier is not None:
                check_same(earlier, manifest, config.output_path)
            try:
                self._facts = await self._start_backend()
                _add_model(manifest, self._facts)
                if earlier is not None:
                    check_same(earlier, manifest, config.output_path)
                else:
                    write_manifest(config.output_path, manifest)
                return await self._run_locked()
            finally:
                await self._backend.close()

    async def _start_backend(self) -> ModelFacts:
        """Start, unless interrupted first: a service may be without a node for minutes."""
        starting = asyncio.create_task(self._backend.start())
        while not starting.done() and not self._interrupted:
            await asyncio.wait({starting}, timeout=TICK_S)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        if self._interrupted:
            raise JobInterrupted("interrupted before the first row; run the same command again")
        return starting.result()

    async def _run_locked(self) -> Summary:
        max_line = int(self._scan.lines[-1])
        self._leader = np.zeros(max_line + 1, dtype=np.int64)
        self._leader[self._scan.lines] = self._scan.leader
        self._failed_lines = bytearray(max_line + 1)
        self._journal = Journal(self._config.output_path, max_line, self._clock)
        self._counters = Counters(self._scan.num_rows, self._clock)
        stopped: JobStopped | None = None
        try:
            for row in self._journal.open():
                self._count(row, cached=True)
            if self._journal.dropped_bytes:
                self._reporter.note(f"dropped a torn last line of {self._journal.dropped_bytes} bytes from {self._config.output_path}")
            try:
                await self._work()
            except JobStopped as error:
                stopped = error
            return self._finish(stopped)
        finally:
            self._journal.close()
            self._reporter.close(self._counters)

    async def _work(self) -> None:
        try:
            await self._generate_all()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._interrupted:
            raise JobInterrupted("interrupted; finished rows are kept, run the same command again")
        if self._file.digest() != self._scan.digest:
            raise self._changed()
        if self._config.dedupe == "exact":
            self._reuse_all()
        if self._journal.num_done != self._scan.num_rows or self._counters.done != self._scan.num_rows:
            raise AssertionError(f"{self._scan.num_rows} rows in, {self._journal.num_done} results out, {self._counters.done} counted")
        if self._config.sort:
            self._journal.sort()

    async def _generate_all(self) -> None:
        pending = self._pending()
        exhausted = False
        while True:
            while not exhausted and self._samples_in_flight < self._config.window and not self._stopping:
                row = next(pending, None)
                if row is None:
                    exhausted = True
                elif isinstance(row, BadRow):
                    self._counters.begun += 1
                    self._write(failed_row(row, ErrorInfo(code=row.code, message=row.message)))
                else:
                    self._counters.begun += 1
                    self._begin(row)
            if self._failure is not None:
                raise self._failure
            self._check_error_rate()
            self._reporter.update(self._counters)
            if self._interrupted or (exhausted and not self._tasks):
                return
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()

    @property
    def _stopping(self) -> bool:
        return self._interrupted or self._failure is not None or self._too_many_failures

    @property
    def _too_many_failures(self) -> bool:
        counters = self._counters
        return counters.begun >= MIN_ROWS_FOR_RATE and counters.failed_now > self._config.max_error_rate * counters.begun

    def _check_error_rate(self) -> None:
        if self._too_many_failures:
            counters = self._counters
            common = ", ".join(f"{code} {number}" for code, number in counters.errors.most_common(3))
            raise TooManyFailures(
                f"{counters.failed_now} of the {counters.begun} rows begun failed, more than --max-error-rate "
                f"{self._config.max_error_rate:g} ({common}); fix the rows or raise the limit"
            )

    def _pending(self) -> Iterator[Row | BadRow]:
        """Rows without a result, in file order; copies of an earlier row wait for its result when results are reused."""
        for line, raw in self._file:
            if line >= len(self._leader):
                raise self._changed()
            if self._journal.done(line) or (self._config.dedupe == "exact" and self._leader[line] != line):
                continue
            yield parse_line(line, raw, self._defaults)

    def _changed(self) -> JobRefused:
        return JobRefused(f"input {self._config.input_path} changed while the job ran; rows may be mismatched, remove the output")

    def _begin(self, row: Row) -> None:
        self._samples_in_flight += row.params.n
        task = asyncio.create_task(self._one(row))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(row, done))

    def _ended(self, row: Row, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._samples_in_flight -= row.params.n
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
        self._wake.set()

    async def _one(self, row: Row) -> None:
        """Generate a row and write its result. Raises BackendLost and JobWriteError, which end the job."""
        seed = seed_base(self._config.seed, row.custom_id, row.params)
        if row.params.seed is None:
            seed >>= 11  # 53 bits: a JSON number that every reader keeps exactly
        row = replace(row, params=msgspec.structs.replace(row.params, seed=seed))
        started = self._clock()
        for attempt in range(1, self._config.retries + 2):
            try:
                async with asyncio.timeout(self._config.row_timeout_s):
                    group = await self._backend.generate(row.prompt, row.params)
                result = result_row(
                    row,
                    group,
                    self._facts,
                    engine_version=self._engine_version,
                    created=int(self._wall_clock()),
                    attempts=attempt,
                    seconds=self._clock() - started,
                )
                info = result.error
            except BackendLost:
                raise
            except TimeoutError:
                message = f"no result within {self._config.row_timeout_s:g} s; raise --row-timeout or lower max_tokens"
                info = ErrorInfo(code="row_timeout", message=message, retryable=True)
                result = failed_row(row, info, attempts=attempt, seconds=self._clock() - started)
            except BatchGenError as error:
                info = error.info()
                result = failed_row(row, info, attempts=attempt, seconds=self._clock() - started)
            if info is None or not info.retryable or attempt > self._config.retries:
                self._write(result)
                return
            self._counters.retries += 1
            await asyncio.sleep(min(0.5 * 2 ** (attempt - 1), 30.0))

    def _write(self, row: ResultRow) -> None:
        self._journal.append([row])
        self._count(row)

    def _count(self, row: ResultRow, cached: bool = False) -> None:
        self._counters.add(row, cached=cached)
        self._failed_lines[row.provenance.line] = row.error is not None

    def _reuse_all(self) -> None:
        """Give every copy the result of the row it repeats."""
        for line, raw in self._file:
            leader = int(self._leader[line])
            if leader != line and not self._journal.done(line):
                row = parse_line(line, raw, self._defaults)
                if isinstance(row, BadRow):
                    raise self._changed()
                self._write(reused_row(row, self._journal.row(leader)))

    def _finish(self, stopped: JobStopped | None) -> Summary:
        failed_path = sibling(self._config.output_path, "failed.jsonl")
        try:
            if self._counters.failed:
                replace_file(failed_path, self._failed_inputs())
            else:
                failed_path.unlink(missing_ok=True)
        except JobWriteError as error:
            stopped = stopped or error
        return summarise(
            self._counters,
            status="completed" if stopped is None else stopped.code,
            exit_code=0 if stopped is None else stopped.exit_code,
            message=None if stopped is None else str(stopped),
            output=str(self._config.output_path),
            failed_output=str(failed_path) if failed_path.exists() else None,
            duplicates=self._scan.num_duplicates,
        )

    def _failed_inputs(self) -> Iterator[bytes]:
        """Input lines of failed rows with their ids written in; over-long lines are left out."""
        for line, raw in self._file:
            if raw is not None and line < len(self._failed_lines) and self._failed_lines[line]:
                yield with_id(raw, parse_line(line, raw, self._defaults).custom_id) + b"\n"


def _add_model(manifest: Manifest, facts: ModelFacts) -> None:
    manifest.model, manifest.model_fingerprint = facts.name, facts.fingerprint
    manifest.dtype, manifest.deterministic = facts.dtype, facts.deterministic
