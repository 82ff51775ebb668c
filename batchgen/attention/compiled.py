"""Attention over paged KV by the CPU's compiled kernel. In: queries, the KV cache. Out: attention outputs. Never writes or copies KV.

Shapes: T tokens, B rows, H KV heads, G query heads per KV head, d key size, V value size, P pages,
C chosen keys.
"""

from dataclasses import dataclass

from torch import Tensor

from batchgen.kernels.cpu import CpuKernels
from batchgen.kv_cache import KVCache, Store
from batchgen.packing import PackedBatch


@dataclass(slots=True, kw_only=True)
class CompiledPlan:
    """Where each token's keys are."""

    row_T: Tensor
    """int64, row of the page table."""
    positions_T: Tensor
    page_table_BP: Tensor


@dataclass(slots=True)
class CompiledAttention:
    """Each token's keys page by page, with a running softmax; batch-invariant."""

    kernels: CpuKernels
    max_shared_rows: int = 0

    def plan(self, batch: PackedBatch, kv: KVCache) -> CompiledPlan:
        """Row of each token."""
        return CompiledPlan(row_T=batch.rows(), positions_T=batch.positions_T, page_table_BP=batch.page_table_BP)

    def attend(
        self,
        q_THGd: Tensor,
        store: Store,
        plan: CompiledPlan,
        scale: float,
        *,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_TC: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H * G * V]."""
        rows = (plan.page_table_BP, plan.row_T, plan.positions_T)
        return self.kernels.attention(
            q_THGd[: len(plan.row_T)], store.k_PHSD, store.v_PHSV, *rows, scale, window=window, sinks_N=sinks_N, chosen_TC=chosen_TC
        )
