"""The coroutine runtime. In: sequences and events. Out: sequences filed by what they need, and a log of the primitives applied.

Every sequence is a generator (`Sequence.run`). `resume` sends it one event and files it under the need it yields next, so the
engine always finds equal needs together. Each primitive of the compute model is a method here and an entry in the event log.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batchgen.sequence import Need, PagesReleased, Resume, Sequence


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One applied primitive or transition."""

    time_s: float
    action: str
    """start, yield, combine, resume or finish."""
    sequence_ids: tuple[int, ...]


class Runtime:
    """Owns the live coroutines."""

    def __init__(self, log_size: int = 4096, clock: Callable[[], float] = time.monotonic):
        self.by_need: dict[Need, dict[int, Sequence]] = {need: {} for need in Need}
        self.finished: list[Sequence] = []
        self.log: deque[LogEntry] = deque(maxlen=log_size)
        self._clock = clock
        self._need: dict[int, Need] = {}

    @property
    def num_live(self) -> int:
        return len(self._need)

    @property
    def decoding(self) -> dict[int, Sequence]:
        """Sequences that need a decode run, oldest first."""
        return self.by_need[Need.DECODE]

    def sequences(self) -> list[Sequence]:
        """All live sequences."""
        return [seq for group in self.by_need.values() for seq in group.values()]

    def start(self, seqs: Iterable[Sequence]) -> None:
        """Begin new coroutines; each runs to its first need."""
        seqs = list(seqs)
        self._record("start", seqs)
        for seq in seqs:
            seq.coroutine = seq.run()
            self._file(seq, next(seq.coroutine))

    def resume(self, seq: Sequence, event: Resume) -> None:
        """Send a suspended sequence what it waited for."""
        del self.by_need[self._need.pop(seq.id)][seq.id]
        try:
            self._file(seq, seq.coroutine.send(event))
        except StopIteration:
            self.finished.append(seq)
            self._record("finish", [seq])

    def yield_(self, seq: Sequence) -> None:
        """Suspend a sequence and release its device pages; only its tokens stay, its KV is recomputed on resumption."""
        self._record("yield", [seq])
        self.resume(seq, PagesReleased())

    def combine(self) -> list[Sequence]:
        """Gather every sequence that needs decoding into one batch, so that each expert sees as many tokens as possible."""
        seqs = list(self.decoding.values())
        self._record("combine", seqs)
        return seqs

    def take_finished(self) -> list[Sequence]:
        """Sequences that finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def _file(self, seq: Sequence, need: Need) -> None:
        self._need[seq.id] = need
        self.by_need[need][seq.id] = seq

    def _record(self, action: str, seqs: list[Sequence]) -> None:
        self.log.append(LogEntry(self._clock(), action, tuple(seq.id for seq in seqs)))
