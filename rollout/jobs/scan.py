"""The first reading of a batch file, before any work. In: a BatchFile. Out: Scan, or JobRefused for duplicate ids. 32 bytes a row."""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.jobs.batch_file import BadRow, BatchFile, parse_line
from rollout.jobs.errors import JobRefused


@dataclass(slots=True, kw_only=True)
class Scan:
    """What a whole file looks like. Arrays have one entry per row, in file order."""

    digest: str
    """blake2b of the file's bytes."""
    lines: np.ndarray
    """int64: the row's 1-based line number."""
    leader: np.ndarray
    """int64: line number of the first row with the same prompt and sampling (its own for the first one)."""
    num_bad: int
    """Rows that will be error rows."""

    @property
    def num_rows(self) -> int:
        return len(self.lines)

    @property
    def num_duplicates(self) -> int:
        """Rows whose prompt and sampling an earlier row has."""
        return int((self.leader != self.lines).sum())

    def examples(self, limit: int = 3) -> list[tuple[int, int]]:
        """Some (earlier line, later line) pairs of duplicates."""
        copies = np.flatnonzero(self.leader != self.lines)[:limit]
        return [(int(self.leader[i]), int(self.lines[i])) for i in copies]

    def describe(self, path: Path, *, reuse: bool) -> str:
        """What a user should know before the work begins."""
        note = f"{self.num_rows} rows in {path}"
        if self.num_bad:
            note += f", {self.num_bad} of them cannot be requests and become error rows"
        if self.num_duplicates:
            pairs = ", ".join(f"{later} = {first}" for first, later in self.examples())
            what = "share a result" if reuse else "are generated again; --dedupe exact reuses results"
            note += f"; {self.num_duplicates} repeat an earlier row's prompt and sampling (lines {pairs}) and {what}"
        return note


def scan(file: BatchFile, defaults: dict[str, Any]) -> Scan:
    """Digest, count and compare all rows. Raises JobRefused when two rows have one custom_id or there are no rows."""
    lines, ids, keys = array("q"), bytearray(), bytearray()
    num_bad = 0
    for number, raw in file:
        row = parse_line(number, raw, defaults)
        lines.append(number)
        ids += _digest(row.custom_id.encode())
        if isinstance(row, BadRow):
            num_bad += 1
            keys += _digest(f"bad {number}".encode())
        else:
            keys += row.key()
    if not lines:
        raise JobRefused(f"input {file.path} has no rows; every non-blank line is one request")
    line_numbers = np.frombuffer(lines, dtype=np.int64)
    digest = file.digest()
    first = _first_equal(ids)
    if (copies := np.flatnonzero(first != np.arange(len(first)))).size:
        later = int(copies[0])
        raise JobRefused(_duplicate_message(file, defaults, int(line_numbers[first[later]]), int(line_numbers[later]), len(copies)))
    return Scan(digest=digest, lines=line_numbers, leader=line_numbers[_first_equal(keys)], num_bad=num_bad)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _first_equal(digests: bytearray) -> np.ndarray:
    """For every 16-byte digest the index of the first equal one."""
    pairs = np.frombuffer(digests, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((np.arange(len(pairs)), pairs[:, 0], pairs[:, 1]))
    same_as_previous = np.zeros(len(pairs), dtype=bool)
    same_as_previous[1:] = (pairs[order[1:]] == pairs[order[:-1]]).all(axis=1)
    run_starts = np.maximum.accumulate(np.where(same_as_previous, 0, np.arange(len(pairs))))
    first = np.empty(len(pairs), dtype=np.int64)
    first[order] = order[run_starts]
    return first


def _duplicate_message(file: BatchFile, defaults: dict[str, Any], first: int, second: int, num_copies: int) -> str:
    custom_id = parse_line(second, file.line(second), defaults).custom_id
    more = f" ({num_copies} such rows in all)" if num_copies > 1 else ""
    where = f"lines {first} and {second} of {file.path}"
    return f"{where} have the same custom_id {custom_id!r}{more}; ids join results to rows, make each unique"
