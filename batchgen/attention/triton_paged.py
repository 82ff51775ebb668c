"""Attention over paged KV by the Triton kernel. In: queries, the KV cache, a plan of the packed batch. Out: attention outputs.

Decode rows are tiles of one query; prefill chunks are cut into tiles of several.

Shapes: T tokens, N tiles, B rows, H KV heads, G query heads per KV head, d head size, P pages.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.paged_attention import attend
from batchgen.kv_cache import KVCache
from batchgen.packing import PackedBatch

PREFILL_TILE_ROWS = 128
"""Queries times query heads per KV head of a prefill tile."""


@dataclass(slots=True, kw_only=True)
class TritonPlan:
    """The tiles of one forward pass: decode rows first, then prefill, each (first token, count, row) as int64 [N]."""

    decode: tuple[Tensor, Tensor, Tensor]
    prefill: tuple[Tensor, Tensor, Tensor]
    tile_queries: int
    positions_T: Tensor
    page_table_BP: Tensor


@dataclass(slots=True)
class TritonAttention:
    """Keys are read where they lie."""

    group: int
    """Query heads per KV head."""

    def plan(self, batch: PackedBatch, kv: KVCache) -> TritonPlan:
        """Cut the batch into tiles."""
        device, num_decode = batch.positions_T.device, batch.num_decode
        rows = torch.arange(num_decode, device=device)
        tile_queries = max(1, PREFILL_TILE_ROWS // self.group)
        return TritonPlan(
            decode=(rows, torch.ones_like(rows), rows),
            prefill=_cut(batch, tile_queries) if len(batch.query_starts) > num_decode + 1 else (rows[:0], rows[:0], rows[:0]),
            tile_queries=tile_queries,
            positions_T=batch.positions_T,
            page_table_BP=batch.page_table_BP.contiguous(),
        )

    def attend(self, q_THGd: Tensor, kv: KVCache, layer: int, plan: TritonPlan, scale: float) -> Tensor:
        """Outputs [T, H * G * d]."""
        q_THGd = q_THGd.contiguous()
        out_THGd = torch.empty_like(q_THGd)
        for tiles, tile_queries in ((plan.decode, 1), (plan.prefill, plan.tile_queries)):
            if len(tiles[0]):
                where = (kv.k_LPHSD[layer], kv.v_LPHSD[layer], plan.page_table_BP, plan.positions_T)
                attend(q_THGd, *where, *tiles, out_THGd, tile_queries=tile_queries, scale=scale)
        return out_THGd.view(len(q_THGd), -1)


def _cut(batch: PackedBatch, tile_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tiles of the rows that are not decode rows."""
    starts_B = np.asarray(batch.query_starts[batch.num_decode :], dtype=np.int64)
    lens_B = np.diff(starts_B)
    tiles_B = -(-lens_B // tile_queries)
    row_N = np.repeat(np.arange(len(lens_B)), tiles_B)
    nth_N = np.arange(len(row_N)) - np.repeat(np.cumsum(tiles_B) - tiles_B, tiles_B)
    count_N = np.minimum(tile_queries, lens_B[row_N] - nth_N * tile_queries)
    cut = np.stack((starts_B[row_N] + nth_N * tile_queries, count_N, row_N + batch.num_decode))
    first_N, count, row = torch.from_numpy(cut).to(batch.positions_T.device)
    return first_N, count, row
