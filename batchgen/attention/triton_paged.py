"""Attention over paged KV on a GPU. In: queries, the KV cache, a plan of the packed batch. Out: attention outputs.

Decode rows are tiles of one query; where they are few, several programs share a row's keys. Keys that consecutive decode rows have in
common are read once for up to a tile of them, and each row goes on from there. Prefill chunks go through FlashAttention if it is
installed; else they are cut into tiles of several queries.

Shapes: T tokens, N tiles, B rows, H KV heads, G query heads per KV head or block of heads, J such blocks, d or C key size, D or V value
size, P pages.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.attention.flash import FlashPlan, FlashPrefill
from batchgen.kernels.paged_attention import SoftmaxState, Tiles, attend
from batchgen.kv_cache import KVCache, Store
from batchgen.packing import PackedBatch

TILE_ROWS = 128
"""Queries times query heads per KV head of a tile of several queries."""
WIDE_DEPTH, WIDE_TILE_ROWS = 256, 64
"""From this value size on, tiles have fewer rows: a program holds all its sums."""
PROGRAMS = 264
"""Programs that keep the device busy: two for each multiprocessor of an H200."""
MOST_PARTS = 32


@dataclass(slots=True, kw_only=True)
class TritonPlan:
    """The tiles of one forward pass; None: there are no such rows."""

    positions_T: Tensor
    shared: Tiles | None
    decode: Tiles | None
    num_parts: int
    """Programs for each decode row and head."""
    prefill: Tiles | FlashPlan | None


@dataclass
class TritonAttention:
    """Keys are read where they lie."""

    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    depth: int
    """Size of a value."""
    flash: FlashPrefill | None = None

    def __post_init__(self) -> None:
        most = TILE_ROWS if self.depth < WIDE_DEPTH else WIDE_TILE_ROWS
        self.block_heads = max(heads for heads in range(1, most + 1) if self.group % heads == 0)
        self.tile_queries = self.max_shared_rows = max(1, most // self.block_heads)

    def plan(self, batch: PackedBatch, kv: KVCache) -> TritonPlan:
        """Cut the batch into tiles."""
        num_decode, shared = batch.num_decode, batch.shared
        table_BP = batch.page_table_BP.contiguous()
        rows_N = torch.arange(num_decode, device=table_BP.device)
        only_decode = len(batch.query_starts) == num_decode + 1
        parts = min(MOST_PARTS, PROGRAMS // max(1, num_decode * self.num_kv_heads * self.group // self.block_heads))
        return TritonPlan(
            positions_T=batch.positions_T,
            shared=None
            if shared is None
            else Tiles(
                queries=self.tile_queries,
                first_N=shared.first_N,
                count_N=shared.count_N,
                row_N=shared.slot_N,
                table=shared.page_table_SP,
                end_N=shared.num_keys_N,
            ),
            decode=Tiles(
                queries=1,
                first_N=rows_N,
                count_N=torch.ones_like(rows_N),
                row_N=rows_N,
                table=table_BP,
                begin_N=None if shared is None else shared.num_keys_B,
            )
            if num_decode
            else None,
            num_parts=max(1, parts) if only_decode else 1,
            prefill=None
            if only_decode
            else self.flash.plan(batch, kv.page_size)
            if self.flash
            else _cut(batch, table_BP, self.tile_queries),
        )

    def attend(
        self,
        q_THGd: Tensor,
        store: Store,
        plan: TritonPlan,
        scale: float,
        *,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_TC: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H * G * V]. `choose_attention` sees to it that no keys are chosen; FlashAttention gets no windows or sinks."""
        assert chosen_TC is None
        q_THGd, num_tokens = q_THGd.contiguous(), len(q_THGd)
        sizes: dict[str, Any] = {"depth": self.depth, "scale": scale}
        limits: dict[str, Any] = sizes | {"window": window, "sinks_N": sinks_N}
        if isinstance(plan.prefill, FlashPlan) and self.flash is not None and plan.decode is None:
            return self.flash.attend(q_THGd, store, plan.prefill, scale)
        q_TJGC = q_THGd.view(num_tokens, -1, self.block_heads, q_THGd.shape[3])
        out_TJGD = q_TJGC.new_empty(*q_TJGC.shape[:3], self.depth)
        where = (q_TJGC, store.k_PHSD, None if store.shape.shares_keys else store.v_PHSV, plan.positions_T)
        state: SoftmaxState | None = None
        decode = plan.decode
        if plan.shared is not None and not window:
            state = attend(*where, plan.shared, **sizes)
        elif plan.shared is not None and decode is not None:
            decode = replace(decode, begin_N=None)
        if decode is not None:
            attend(*where, decode, out_TJGD=out_TJGD, resume=state, num_parts=plan.num_parts, **limits)
        if isinstance(plan.prefill, FlashPlan) and self.flash is not None:
            prefilled_CX = self.flash.attend(q_THGd, store, plan.prefill, scale)
            out_TJGD.view(num_tokens, -1)[plan.prefill.first_token :] = prefilled_CX
        elif isinstance(plan.prefill, Tiles):
            attend(*where, plan.prefill, out_TJGD=out_TJGD, **limits)
        return out_TJGD.view(num_tokens, -1)


def _cut(batch: PackedBatch, table_BP: Tensor, tile_queries: int) -> Tiles:
    """Tiles of the rows that are not decode rows."""
    starts_B = np.asarray(batch.query_starts[batch.num_decode :], dtype=np.int64)
    lens_B = np.diff(starts_B)
    tiles_B = -(-lens_B // tile_queries)
    row_N = np.repeat(np.arange(len(lens_B)), tiles_B)
    nth_N = np.arange(len(row_N)) - np.repeat(np.cumsum(tiles_B) - tiles_B, tiles_B)
    count_N = np.minimum(tile_queries, lens_B[row_N] - nth_N * tile_queries)
    cut = np.stack((starts_B[row_N] + nth_N * tile_queries, count_N, row_N + batch.num_decode))
    first_N, count, row = torch.from_numpy(cut).to(batch.positions_T.device)
    return Tiles(queries=tile_queries, first_N=first_N, count_N=count, row_N=row, table=table_BP)
