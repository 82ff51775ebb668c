"""Steps as CUDA graphs: one launch instead of a thousand. In: functions of fixed shape over fixed buffers. Out: what they return.

Parameters and slot arrays keep their storage, so graphs outlive weight updates.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")

FINE_ROWS, FINE_STEP, COARSE_STEP = 128, 8, 64
"""Row counts are padded to multiples of 8 up to 128, of 64 beyond; below 8 to powers of two."""


def padded(num_rows: int) -> int:
    """Rows of the captured step that runs `num_rows` rows."""
    if num_rows <= FINE_STEP:
        return 1 << (num_rows - 1).bit_length()
    step = FINE_STEP if num_rows <= FINE_ROWS else COARSE_STEP
    return -(-num_rows // step) * step


class Graphs(Generic[T]):
    """Captured functions by key."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """The function's result, in buffers that the next call with any key may overwrite. The first call with a key runs the function as
        it is, which compiles and chooses its kernels, and captures it for the calls to come."""
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        first = function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._graphs[key] = graph, result
        log.debug("captured %s", key)
        return first
