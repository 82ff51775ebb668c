"""The output file, which is also the progress. In: ResultRows. Out: lines on disk, one per input row. Never rewrites a line in place."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from rollout.jobs.errors import JobRefused, JobWriteError
from rollout.jobs.results import ResultRow

FSYNC_INTERVAL_S = 5.0
"""Most seconds of finished rows that a power cut can take; a killed process loses none that were written."""
_FIRST_READ_BYTES = 8 << 10


class Journal:
    """Appends whole lines and knows where each input line's result is.

    `offsets[line]` is the byte offset of the result of input line `line`, -1 while there is none.
    """

    def __init__(self, path: Path, max_line: int, clock: Callable[[], float] = time.monotonic):
        self.path = path
        self.offsets = np.full(max_line + 1, -1, dtype=np.int64)
        self.dropped_bytes = 0
        """Length of a torn last line that `open` cut off."""
        self._clock = clock
        self._fd = -1
        self._size = 0
        self._synced_at = clock()
        self._dirty = False
        self._broken: JobWriteError | None = None

    @property
    def num_done(self) -> int:
        return int((self.offsets >= 0).sum())

    def done(self, line: int) -> bool:
        return bool(self.offsets[line] >= 0)

    def open(self) -> Iterator[ResultRow]:
        """Open for appending and yield the rows already there. A torn last line is cut off; any other foreign line is JobRefused."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                last = end + len(raw) == size
                row = self._decode(raw) if raw.endswith(b"\n") else None
                if row is None:
                    if last:
                        break
                    raise JobRefused(f"line {number} of {self.path} is not a result of this job; repair the file or choose another output")
                line = row.provenance.line
                if not 0 < line < len(self.offsets):
                    raise JobRefused(f"line {number} of {self.path} answers input line {line}, which does not exist; choose another output")
                if self.offsets[line] >= 0:
                    raise JobRefused(f"line {number} of {self.path} answers input line {line} a second time; remove one of the two")
                self.offsets[line] = end
                end += len(raw)
                yield row
        if end < size:
            self.dropped_bytes = size - end
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        self._size = end

    def append(self, rows: Iterable[ResultRow]) -> None:
        """Write rows at once. Raises JobWriteError, with the file as it was before the call; nothing is written after that."""
        if self._broken is not None:
            raise self._broken
        data = bytearray()
        starts: dict[int, int] = {}
        for row in rows:
            line = row.provenance.line
            if self.offsets[line] >= 0 or line in starts:
                raise AssertionError(f"input line {line} has two results")
            starts[line] = self._size + len(data)
            data += msgspec.json.encode(row)
            data += b"\n"
        try:
            _write_all(self._fd, data)
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            self._broken = JobWriteError(
                f"cannot write {self.path}: {error.strerror}; {self.num_done} rows are kept, make room and run the same command again"
            )
            raise self._broken from error
        for line, offset in starts.items():
            self.offsets[line] = offset
        self._size += len(data)
        self._dirty = True
        if self._clock() - self._synced_at >= FSYNC_INTERVAL_S:
            self.sync()

    def sync(self) -> None:
        """Make everything written survive a power cut."""
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise JobWriteError(f"cannot flush {self.path} to disk: {error.strerror}; run the same command again") from error
        self._dirty = False
        self._synced_at = self._clock()

    def close(self) -> None:
        if self._fd >= 0:
            try:
                self.sync()
            finally:
                os.close(self._fd)
                self._fd = -1

    def raw(self, line: int) -> bytes:
        """The written line that answers an input line, its newline included."""
        offset = int(self.offsets[line])
        chunks = bytearray()
        while not chunks.endswith(b"\n"):
            chunk = os.pread(self._fd, max(_FIRST_READ_BYTES, len(chunks)), offset + len(chunks))
            if not chunk:
                raise JobRefused(f"{self.path} was cut short by another process; run the same command again")
            head, newline, _ = chunk.partition(b"\n")
            chunks += head + newline
        return bytes(chunks)

    def row(self, line: int) -> ResultRow:
        """The result of an input line."""
        return msgspec.json.decode(self.raw(line), type=ResultRow)

    def sort(self) -> None:
        """Put the whole file in input order, atomically."""
        lines = np.flatnonzero(self.offsets >= 0)
        offset = 0
        starts = np.full_like(self.offsets, -1)

        def in_order() -> Iterator[bytes]:
            nonlocal offset
            for line in lines:
                raw = self.raw(int(line))
                starts[line] = offset
                offset += len(raw)
                yield raw

        replace_file(self.path, in_order())
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self.offsets, self._size = starts, offset

    @staticmethod
    def _decode(raw: bytes) -> ResultRow | None:
        try:
            return msgspec.json.decode(raw, type=ResultRow)
        except (msgspec.DecodeError, RecursionError):
            return None


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file so that a crash leaves the old or the new one, never a part. Raises JobWriteError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise JobWriteError(f"cannot write {path}: {error.strerror}; the earlier file is unchanged") from error


def _write_all(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
