"""Which attention a device uses. In: the device's arithmetic. Out: a backend. Never computes.

A backend is planned once per forward pass and used by every layer.
"""

import logging
from typing import Any, Protocol

import torch
from torch import Tensor

from batchgen.arithmetic import Arithmetic
from batchgen.attention.compiled import CompiledAttention
from batchgen.attention.reference import ReferenceAttention
from batchgen.kv_cache import HeadSizes, KVCache, Store
from batchgen.packing import PackedBatch

log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over its paged KV."""

    max_shared_rows: int
    """Most decode rows whose common first keys it reads once; 0: it has no use for `PackedBatch.shared`."""

    def plan(self, batch: PackedBatch, kv: KVCache) -> Any:
        """What all layers of one forward pass share."""
        ...

    def attend(
        self,
        q_THGd: Tensor,
        store: Store,
        plan: Any,
        scale: float,
        *,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_TC: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H * G * V] in the type of the queries, for the batch's tokens; queries beyond them are padding.

        `window`: a token sees so many last keys alone (0: all). `sinks_N`: float32, a score per query head that takes part in the softmax
        without a value. `chosen_TC`: int64 positions that a token sees, ascending, then -1.
        """
        ...


def choose_attention(arithmetic: Arithmetic, heads: HeadSizes | None, plain: bool) -> AttentionBackend:
    """The compiled one where there are kernels, the Triton one on a GPU (sizes that are powers of two), else plain torch.

    `heads`: if all layers that attend have the same. `plain`: they attend to all keys, which are as wide as values, and to nothing else.
    """
    if arithmetic.cpu_kernels is not None:
        return CompiledAttention(arithmetic.cpu_kernels)
    sizes = [size for size in heads[2:] if size] if heads else []
    takes = arithmetic.device.type == "cuda" and not arithmetic.deterministic and all(n.bit_count() == 1 and n >= 16 for n in sizes)
    if heads and takes:
        from batchgen.attention.flash import FlashPrefill
        from batchgen.attention.triton_paged import TritonAttention

        log.info("attention: Triton over paged KV")
        num_heads, num_kv_heads, head_dim, _ = heads
        flash = FlashPrefill.load(head_dim) if plain and arithmetic.compute_dtype == torch.bfloat16 else None
        return TritonAttention(num_kv_heads, num_heads // num_kv_heads, head_dim, flash)
    log.info("attention: plain torch")
    return ReferenceAttention(deterministic=arithmetic.deterministic)
