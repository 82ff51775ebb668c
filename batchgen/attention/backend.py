"""Which attention a device uses. In: the device's arithmetic. Out: a backend. Never computes.

A backend is planned once per forward pass and used by every layer.
"""

from typing import Any, Protocol

from torch import Tensor

from batchgen.arithmetic import Arithmetic
from batchgen.attention.compiled import CompiledAttention
from batchgen.attention.reference import ReferenceAttention
from batchgen.kv_cache import KVCache
from batchgen.packing import PackedBatch


class AttentionBackend(Protocol):
    """Causal attention of a packed batch over its paged KV."""

    def plan(self, batch: PackedBatch, kv: KVCache) -> Any:
        """What all layers of one forward pass share."""
        ...

    def attend(self, q_THGd: Tensor, kv: KVCache, layer: int, plan: Any, scale: float) -> Tensor:
        """Outputs [T, H * G * d] in the type of the queries, for the batch's tokens; queries beyond them are padding."""
        ...


def choose_attention(arithmetic: Arithmetic) -> AttentionBackend:
    """The compiled one where there are kernels, else plain torch."""
    if arithmetic.kernels is not None:
        return CompiledAttention(arithmetic.kernels)
    return ReferenceAttention(deterministic=arithmetic.deterministic)
