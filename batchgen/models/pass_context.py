"""What all layers of one forward pass share. In: the packed batch, the KV cache. Out: views and tables, each made once.
Never computes a layer.

Shapes: T tokens with padding, N rows of a store, R rotated dimensions, P positions, C chosen keys.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.attention.backend import AttentionBackend
from batchgen.kv_cache import KVCache, Store
from batchgen.models.rotary import Rope, rotary_table
from batchgen.packing import PackedBatch, Spans


class RotaryTables:
    """Tables of angles by rope and width, shared by layers."""

    def __init__(self, max_positions: int, device: torch.device):
        self._max_positions, self._device = max_positions, device
        self._tables: dict[tuple[Rope, int], Tensor] = {}

    def require(self, rope: Rope, width: int) -> None:
        """Make the table; forward passes only read."""
        if (rope, width) not in self._tables:
            self._tables[rope, width] = rotary_table(self._max_positions, width, rope, self._device)

    def at(self, rope: Rope, width: int, positions_T: Tensor) -> Tensor:
        """float32 [T, 2, R]."""
        return self._tables[rope, width][positions_T]


@dataclass(slots=True, kw_only=True)
class Pass:
    """One forward pass."""

    batch: PackedBatch
    kv: KVCache
    attention: AttentionBackend
    plan: Any
    tables: RotaryTables
    num_padding: int
    """Rows behind the batch's tokens."""
    chosen_TC: Tensor | None = None
    """Positions that the last full indexer chose, for layers that share them."""
    _rotary: dict[tuple[Rope, int], Tensor] = field(default_factory=dict)
    _head_slots: dict[int, Tensor] = field(default_factory=dict)
    _spans: Spans | None = None
    _longest: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.batch.input_ids_T.numel()

    @property
    def longest(self) -> int:
        """Context of the longest row."""
        if self._longest is None:
            self._longest = int(self.batch.context_lens_B.max())
        return self._longest

    def rotary(self, rope: Rope, width: int) -> Tensor:
        """float32 [T, 2, R] of all rows."""
        if (rope, width) not in self._rotary:
            self._rotary[rope, width] = self.tables.at(rope, width, F.pad(self.batch.positions_T, (0, self.num_padding)))
        return self._rotary[rope, width]

    def head_slots(self, num_heads: int) -> Tensor:
        """Where the batch's tokens are written in a store of so many heads."""
        if num_heads not in self._head_slots:
            self._head_slots[num_heads] = self.kv.head_slots(self.batch.kv_slots_T, num_heads)
        return self._head_slots[num_heads]

    def spans(self) -> Spans:
        """Which tokens carry which sequence's state on."""
        if self._spans is None:
            self._spans = self.batch.spans()
        return self._spans

    def attend(self, q_THGd: Tensor, store: Store, scale: float, **options: Any) -> Tensor:
        """Attention outputs of all rows; padding gets zeros."""
        out_TX = self.attention.attend(q_THGd, store, self.plan, scale, **options)
        return F.pad(out_TX, (0, 0, 0, self.num_padding)) if self.num_padding else out_TX
