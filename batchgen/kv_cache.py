"""The keys and values of every page. In: page and slot numbers. Out: reads and writes of KV tensors. Never decides who owns a page.

Shapes: L layers, P pages, H KV heads, S slots of a page, D head size, T tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.huge_pages import empty_huge
from batchgen.models.config import ModelConfig


class KVCache:
    """Two tensors, k_LPHSD and v_LPHSD: within a page each head's keys lie together, so a head's page is one contiguous run."""

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str):
        shape = (config.num_layers, num_pages + 1, config.num_kv_heads, page_size, config.head_dim)
        self.num_pages = num_pages
        self.spare_page = num_pages
        """One page more, which nobody owns: rows that are padding write there."""
        self.page_size = page_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.k_LPHSD = empty_huge(shape, dtype, device).zero_()
        self.v_LPHSD = empty_huge(shape, dtype, device).zero_()
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    @classmethod
    def bytes_per_page(cls, config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one page over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * page_size * config.head_dim * dtype.itemsize

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages, for a sample that continues a shared, partly filled page."""
        source_N, target_N = (torch.tensor(pages, device=self.k_LPHSD.device) for pages in (sources, targets))
        for cache in (self.k_LPHSD, self.v_LPHSD):
            cache.index_copy_(1, target_N, cache.index_select(1, source_N))

    def head_slots(self, kv_slots_T: Tensor) -> Tensor:
        """Row of each (token, head) in a layer's KV seen as [P * H * S, D]; flattened over T and H."""
        page_T, offset_T = kv_slots_T // self.page_size, kv_slots_T % self.page_size
        heads_H = torch.arange(self.num_kv_heads, device=kv_slots_T.device)
        return ((page_T[:, None] * self.num_kv_heads + heads_H) * self.page_size + offset_T[:, None]).reshape(-1)

    def begin_pages(self, kv_slots_T: Tensor) -> None:
        """Clear the values of pages whose first slot is written now: a masked key still multiplies its value by zero, and zero times a
        former owner's NaN would be NaN."""
        fresh_N = kv_slots_T[kv_slots_T % self.page_size == 0] // self.page_size
        self.v_LPHSD.index_fill_(1, fresh_N, 0.0)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values seen as [P * H * S, D], the rows that `head_slots` numbers."""
        return self.k_LPHSD[layer].view(-1, self.head_dim), self.v_LPHSD[layer].view(-1, self.head_dim)

    def write(self, layer: int, head_slots_N: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Store this step's keys and values of one layer at the rows given by `head_slots`."""
        for rows_ND, new_THD in zip(self.rows(layer), (k_THD, v_THD), strict=True):
            rows_ND.index_copy_(0, head_slots_N, new_THD.reshape(-1, self.head_dim).to(rows_ND.dtype))

    def gather(self, layer: int, page_heads_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [N, S * D] of a layer's (page, head) rows, numbered page * H + head. Valid until the next call: the buffers are
        kept, since fresh memory costs the kernel more than the copy."""
        gathered = []
        for name, cache in (("k", self.k_LPHSD), ("v", self.v_LPHSD)):
            rows = cache[layer].view(-1, self.page_size * self.head_dim)
            shape = (page_heads_N.numel(), rows.shape[1])
            out = torch.index_select(rows, 0, page_heads_N, out=self._buffer(name, rows.dtype, shape))
            gathered.append(out if out.dtype == dtype else self._buffer(name, dtype, shape).copy_(out))
        return gathered[0], gathered[1]

    def _buffer(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        buffer = self._scratch.get((name, dtype))
        if buffer is None or buffer.numel() < shape[0] * shape[1]:
            buffer = self._scratch[name, dtype] = self.k_LPHSD.new_empty(shape[0] * shape[1], dtype=dtype)
        return buffer[: shape[0] * shape[1]].view(shape)
