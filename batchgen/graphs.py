"""Decode steps as CUDA graphs: one launch instead of a thousand. In: a packed batch of decode rows. Out: the final hidden states.

A graph is captured for a padded number of rows when that number first occurs, over buffers that every replay fills anew; padding rows
write to the cache's spare page. Parameters keep their storage, so graphs outlive weight updates.

Shapes: T rows, P pages, D model.
"""

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from batchgen.kv_cache import KVCache
from batchgen.packing import PackedBatch

log = logging.getLogger(__name__)

FINE_ROWS, FINE_STEP, COARSE_STEP = 128, 8, 64
"""Row counts are padded to multiples of 8 up to 128, of 64 beyond; below 8 to powers of two."""


class HiddenModel(Protocol):
    """The part of a model that is captured."""

    def hidden(self, batch: PackedBatch, kv: KVCache) -> tuple[Tensor, Any]:
        """Final hidden states, and what else a pass gives."""
        ...


class DecodeGraphs:
    """The graphs of one model and cache."""

    def __init__(self, model: HiddenModel, kv: KVCache, max_rows: int, max_pages: int):
        device = kv.k_LPHSD.device
        self._model, self._kv = model, kv
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        rows = _padded(max_rows)
        self._input_ids_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._kv_slots_T = torch.zeros(rows, dtype=torch.int64, device=device)
        self._page_table_TP = torch.zeros(rows, max_pages, dtype=torch.int64, device=device)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, D] of a batch of decode rows; valid until the next call."""
        num_rows, width = batch.page_table_BP.shape
        size = _padded(num_rows)
        spare = self._kv.spare_page
        for buffer, values, padding in (
            (self._input_ids_T, batch.input_ids_T, 0),
            (self._positions_T, batch.positions_T, 0),
            (self._kv_slots_T, batch.kv_slots_T, spare * self._kv.page_size),
        ):
            buffer[:num_rows] = values
            buffer[num_rows:size] = padding
        self._page_table_TP[:num_rows, :width] = batch.page_table_BP
        self._page_table_TP[num_rows:size] = spare
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        graph, hidden_TD = self._graphs[size]
        graph.replay()
        return hidden_TD[:num_rows]

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        batch = PackedBatch(
            input_ids_T=self._input_ids_T[:size],
            positions_T=self._positions_T[:size],
            kv_slots_T=self._kv_slots_T[:size],
            query_starts=list(range(size + 1)),
            num_decode=size,
            context_lens_B=self._positions_T[:size] + 1,
            page_table_BP=self._page_table_TP[:size],
            logit_index_M=self._positions_T[:0],
            return_routed=False,
        )
        self._model.hidden(batch, self._kv)  # kernels are compiled and chosen outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden_TD, _ = self._model.hidden(batch, self._kv)
        log.debug("captured a decode step of %d rows", size)
        return graph, hidden_TD


def _padded(num_rows: int) -> int:
    if num_rows <= FINE_STEP:
        return 1 << (num_rows - 1).bit_length()
    step = FINE_STEP if num_rows <= FINE_ROWS else COARSE_STEP
    return -(-num_rows // step) * step
