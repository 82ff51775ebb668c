"""What sequences leave behind on the device: pages of keys and values, and states of fixed size. In: page, slot and state numbers.
Out: reads and writes. Never decides who owns a page or a state.

Shapes: L stores of equal shape, P pages, H KV heads, S slots of a page, D key size, V value size, T tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.huge_pages import empty_huge


@dataclass(frozen=True, slots=True)
class PageShape:
    """What one store keeps of each token."""

    num_heads: int
    key_dim: int
    value_dim: int
    shares_keys: bool = False
    """Values are the first `value_dim` columns of the keys (a latent) and take no room of their own."""

    @property
    def numel(self) -> int:
        return self.num_heads * (self.key_dim + (0 if self.shares_keys else self.value_dim))


HeadSizes = tuple[int, int, int, int]
"""Query heads, KV heads, size of a value, by how much a key is wider."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All stores of a model, layer by layer."""

    pages: tuple[PageShape, ...]
    states: tuple[tuple[int, ...], ...] = ()
    """Shape of each state of a sequence; float32."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that each token adds."""
        return sum(shape.numel for shape in self.pages) * dtype.itemsize

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a sequence's states, however long it is."""
        return 4 * sum(math.prod(shape) for shape in self.states)


class Store:
    """One layer's pages: within a page each head's keys lie together, so a head's page is one contiguous run."""

    def __init__(self, shape: PageShape, k_PHSD: Tensor, v_PHSV: Tensor, buffers: dict[tuple[str, torch.dtype], Tensor]):
        self.shape = shape
        self.num_heads, self.page_size = k_PHSD.shape[1], k_PHSD.shape[2]
        self.k_PHSD, self.v_PHSV = k_PHSD, v_PHSV
        self._buffers = buffers

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values seen as [P * H * S, D], the rows that `KVCache.head_slots` numbers."""
        return self.k_PHSD.view(-1, self.shape.key_dim), self.v_PHSV.view(-1, self.shape.value_dim)

    def write(self, head_slots_N: Tensor, k_THD: Tensor, v_THV: Tensor | None = None) -> None:
        """Store this step's keys and values at the rows given by `head_slots`; values that share the keys come with them."""
        pairs = [(self.k_PHSD, k_THD)] if v_THV is None else [(self.k_PHSD, k_THD), (self.v_PHSV, v_THV)]
        for cache, new in pairs:
            rows_ND = cache.view(-1, cache.shape[-1])
            rows_ND.index_copy_(0, head_slots_N, new.reshape(-1, cache.shape[-1]).to(rows_ND.dtype))

    def gather(self, page_heads_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, S, D] and values [N, S, V] of (page, head) rows, numbered page * H + head. Valid until the next call: the buffers are
        kept, since fresh memory costs the kernel more than the copy."""
        k_NSD = self._gather("k", self.k_PHSD, page_heads_N, dtype)
        if self.shape.shares_keys:
            return k_NSD, k_NSD[..., : self.shape.value_dim]
        return k_NSD, self._gather("v", self.v_PHSV, page_heads_N, dtype)

    def _gather(self, name: str, cache: Tensor, page_heads_N: Tensor, dtype: torch.dtype) -> Tensor:
        rows = cache.view(-1, self.page_size * cache.shape[-1])
        shape = (page_heads_N.numel(), rows.shape[1])
        out = torch.index_select(rows, 0, page_heads_N, out=self._buffer(name, rows.dtype, shape))
        out = out if out.dtype == dtype else self._buffer(name, dtype, shape).copy_(out)
        return out.view(-1, self.page_size, cache.shape[-1])

    def _buffer(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < shape[0] * shape[1]:
            buffer = self._buffers[name, dtype] = self.k_PHSD.new_empty(shape[0] * shape[1], dtype=dtype)
        return buffer[: shape[0] * shape[1]].view(shape)


class KVCache:
    """`stores` and `states` in the layout's order; stores of equal shape are stacked in one tensor.

    There is one page and one state more than asked for, which nobody owns: rows that are padding write there.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_states: int = 0,
    ):
        self.layout = layout
        self.num_pages = self.spare_page = num_pages
        self.num_states = self.spare_state = num_states
        self.page_size = page_size
        self.dtype, self.device = dtype, torch.device(device)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        """What is multiplied by probabilities."""
        stacks: dict[PageShape, tuple[Tensor, Tensor]] = {}
        for shape in dict.fromkeys(layout.pages):
            size = (layout.pages.count(shape), num_pages + 1, shape.num_heads, page_size)
            k = empty_huge((*size, shape.key_dim), dtype, device).zero_()
            v = k[..., : shape.value_dim] if shape.shares_keys else empty_huge((*size, shape.value_dim), dtype, device).zero_()
            stacks[shape] = k, v
            self._keys.append(k)
            self._values.append(v)
        places = dict.fromkeys(stacks, 0)
        buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.stores: list[Store] = []
        for shape in layout.pages:
            k, v = stacks[shape]
            self.stores.append(Store(shape, k[places[shape]], v[places[shape]], buffers))
            places[shape] += 1
        self.states = [torch.zeros(num_states + 1, *shape, device=device) for shape in layout.states]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, for a sample that continues a shared, partly filled page."""
        source_N, target_N = (torch.tensor(pages, device=self.device) for pages in (sources, targets))
        own_values = [v for shape, v in zip(dict.fromkeys(self.layout.pages), self._values, strict=True) if not shape.shares_keys]
        for cache in (*self._keys, *own_values):
            cache.index_copy_(1, target_N, cache.index_select(1, source_N))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole states, for samples that go on from a shared prompt's."""
        source_N, target_N = (torch.tensor(places, device=self.device) for places in (sources, targets))
        for state in self.states:
            state.index_copy_(0, target_N, state.index_select(0, source_N))

    def head_slots(self, kv_slots_T: Tensor, num_heads: int) -> Tensor:
        """Row of each (token, head) in a store's pages seen as [P * H * S, D]; flattened over T and H."""
        page_T, offset_T = kv_slots_T // self.page_size, kv_slots_T % self.page_size
        heads_H = torch.arange(num_heads, device=kv_slots_T.device)
        return ((page_T[:, None] * num_heads + heads_H) * self.page_size + offset_T[:, None]).reshape(-1)

    def begin_pages(self, kv_slots_T: Tensor) -> None:
        """Clear the values of pages whose first slot is written now: a masked key still multiplies its value by zero, and zero times a
        former owner's NaN would be NaN."""
        fresh_N = kv_slots_T[kv_slots_T % self.page_size == 0] // self.page_size
        for values in self._values:
            values.index_fill_(1, fresh_N, 0.0)
