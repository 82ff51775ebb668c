"""Which decode rows begin with the same pages. In: the rows' page lists. Out: runs of rows, as tensors for a step. Never reads KV.

Shapes: N runs, B rows, S slots, P pages.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from batchgen.packing import SharedPrefix

MIN_PAGES = 4
"""Shorter prefixes are not worth a run."""
MIN_SAVED_FRACTION = 0.1
"""Of all pages: below, each row reads its own."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows first..first+count-1 share their first `num_pages` pages."""

    first: int
    count: int
    num_pages: int


def shared_runs(pages: Sequence[Sequence[int]], max_rows: int) -> list[Run]:
    """Runs of at most `max_rows` consecutive rows worth reading together, or none if they would save little.

    Equal pages at one place mean equal pages before it: a page is shared only together with all that precede it.
    """
    common = [_num_common(a, b) for a, b in pairwise(pages)]
    runs: list[Run] = []
    first = 0
    while first < len(common):
        count, length = 2, common[first]
        while count < max_rows and first + count - 1 < len(common):
            shorter = min(length, common[first + count - 1])
            if shorter * count < length * (count - 1):  # one row more would save less than it costs the others
                break
            count, length = count + 1, shorter
        if length >= MIN_PAGES:
            runs.append(Run(first, count, length))
            first += count
        else:
            first += 1
    saved = sum(run.num_pages * (run.count - 1) for run in runs)
    return runs if saved >= MIN_SAVED_FRACTION * sum(map(len, pages)) else []


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    if not a or not b or a[0] != b[0]:
        return 0
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])


class SharedPrefixes:
    """Runs in buffers of fixed size, for captured steps."""

    def __init__(self, num_rows: int, page_size: int, page_table_SP: Tensor):
        device = page_table_SP.device
        self._page_size, self._page_table_SP = page_size, page_table_SP
        self._runs_4N = torch.zeros(4, num_rows // 2 + 1, dtype=torch.int64, device=device)
        self._num_keys_B = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def fill(self, runs: Sequence[Run], slots: np.ndarray) -> None:
        """Take over the runs among rows with these slots."""
        values_4N = np.zeros(self._runs_4N.shape, np.int64)
        num_keys_B = np.zeros(len(self._num_keys_B), np.int64)
        for n, run in enumerate(runs):
            num_keys = run.num_pages * self._page_size
            values_4N[:, n] = run.first, run.count, num_keys, slots[run.first]
            num_keys_B[run.first : run.first + run.count] = num_keys
        self._runs_4N.copy_(torch.from_numpy(values_4N))
        self._num_keys_B.copy_(torch.from_numpy(num_keys_B))

    def view(self, num_rows: int) -> SharedPrefix:
        """What `fill` took over, for a step of that many rows."""
        first_N, count_N, num_keys_N, slot_N = self._runs_4N[:, : num_rows // 2 + 1]
        return SharedPrefix(
            first_N=first_N,
            count_N=count_N,
            num_keys_N=num_keys_N,
            slot_N=slot_N,
            page_table_SP=self._page_table_SP,
            num_keys_B=self._num_keys_B[:num_rows],
        )
