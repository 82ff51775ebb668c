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
from batchgen.kernels.cpu import CpuKernels
from batchgen.kv_cache import KVCache
from batchgen.models.config import ModelConfig
from batchgen.packing import PackedBatch

log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over its paged KV."""

    max_shared_rows: int
    """Most decode rows whose common first keys it reads once; 0: it has no use for `PackedBatch.shared`."""

    def plan(self, batch: PackedBatch, kv: KVCache) -> Any:
        """What all layers of one forward pass share."""
        ...

    def attend(self, q_THGd: Tensor, kv: KVCache, layer: int, plan: Any, scale: float) -> Tensor:
        """Outputs [T, H * G * d] in the type of the queries, for the batch's tokens; queries beyond them are padding."""
        ...


def choose_attention(arithmetic: Arithmetic, config: ModelConfig) -> AttentionBackend:
    """The compiled one where there are kernels, the Triton one on a GPU (head sizes that are powers of two), else plain torch."""
    if isinstance(arithmetic.kernels, CpuKernels):
        return CompiledAttention(arithmetic.kernels)
    if arithmetic.device.type == "cuda" and not arithmetic.deterministic and config.head_dim.bit_count() == 1 and config.head_dim >= 16:
        from batchgen.attention.flash import FlashPrefill
        from batchgen.attention.triton_paged import TritonAttention

        log.info("attention: Triton over paged KV")
        flash = FlashPrefill.load(config.head_dim) if arithmetic.compute_dtype == torch.bfloat16 else None
        return TritonAttention(config.num_kv_heads, config.num_heads // config.num_kv_heads, flash)
    log.info("attention: plain torch")
    return ReferenceAttention(deterministic=arithmetic.deterministic)
