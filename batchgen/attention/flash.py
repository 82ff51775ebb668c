"""Prefill attention by FlashAttention, where a package of it is installed. In: queries, a layer's pages, a plan. Out: attention outputs.

The keys of the prefill rows are copied out of their pages first, a small part of the work: a chunk of some thousand tokens attends to
all of them.

Shapes: T tokens of the prefill rows, C keys of all their contexts, N pages of them, P pages, H KV heads, G query heads per KV head, S slots
of a page, d head size.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.paged_attention import copy_pages
from batchgen.kv_cache import Store
from batchgen.packing import PackedBatch

log = logging.getLogger(__name__)

PACKAGES = ("flash_attn_interface", "fa3_fwd_interface", "flash_attn")
"""Modules with `flash_attn_varlen_func`: FlashAttention 3 as its authors build it, the forward-only wheel `fa3-fwd`, FlashAttention 2."""
HEAD_DIMS = (64, 128, 256)


@dataclass(slots=True, kw_only=True)
class FlashPlan:
    """The prefill rows of one pass."""

    first_token: int
    query_starts: Tensor
    """int32, rows + 1."""
    key_starts: Tensor
    """int32, rows + 1."""
    max_queries: int
    max_keys: int
    num_keys: int
    pages_3N: Tensor
    """int64: page, where its first key goes, how many keys it holds."""


class FlashPrefill:
    """The package's function for ragged batches."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]):
        self._function = function

    @classmethod
    def load(cls, head_dim: int) -> "FlashPrefill | None":
        """The first of PACKAGES that can be imported, if it takes this head size on this device."""
        if head_dim not in HEAD_DIMS or torch.cuda.get_device_capability() < (8, 0):
            return None
        for name in PACKAGES:
            if name != "flash_attn" and torch.cuda.get_device_capability() != (9, 0):
                continue
            try:
                function = importlib.import_module(name).flash_attn_varlen_func
            except (ImportError, AttributeError):
                continue
            log.info("prefill attention: %s", name)
            return cls(function)
        return None

    def plan(self, batch: PackedBatch, page_size: int) -> FlashPlan:
        """Where the prefill rows' queries and keys are."""
        device, first = batch.positions_T.device, batch.query_starts[batch.num_decode]
        starts = np.asarray(batch.query_starts[batch.num_decode :]) - first
        contexts_B = np.asarray(batch.prefill_contexts)
        key_starts = np.concatenate([[0], contexts_B.cumsum()])
        pages_B = -(-contexts_B // page_size)
        row_N = np.repeat(np.arange(len(pages_B)), pages_B)
        nth_N = np.arange(len(row_N)) - np.repeat(pages_B.cumsum() - pages_B, pages_B)
        begin_N = nth_N * page_size
        index = torch.from_numpy(np.stack([row_N + batch.num_decode, nth_N])).to(device)
        spans = np.stack([key_starts[row_N] + begin_N, np.minimum(page_size, contexts_B[row_N] - begin_N)])
        return FlashPlan(
            first_token=first,
            query_starts=torch.from_numpy(starts.astype(np.int32)).to(device),
            key_starts=torch.from_numpy(key_starts.astype(np.int32)).to(device),
            max_queries=int(np.diff(starts).max()),
            max_keys=int(contexts_B.max()),
            num_keys=int(key_starts[-1]),
            pages_3N=torch.cat([batch.page_table_BP[index[0], index[1]][None], torch.from_numpy(spans).to(device)]),
        )

    def attend(self, q_THGd: Tensor, store: Store, plan: FlashPlan, scale: float) -> Tensor:
        """Outputs [T, H * G * d] of the prefill rows' tokens."""
        num_kv_heads, group, depth = q_THGd.shape[1:]
        k_CHd, v_CHd = q_THGd.new_empty(2, plan.num_keys, num_kv_heads, depth)
        copy_pages(store.k_PHSD, store.v_PHSV, plan.pages_3N, k_CHd, v_CHd)
        q_THd = q_THGd[plan.first_token :].view(-1, num_kv_heads * group, depth)
        sizes = (plan.query_starts, plan.key_starts, plan.max_queries, plan.max_keys)
        out = self._function(q_THd, k_CHd, v_CHd, *sizes, softmax_scale=scale, causal=True)
        return (out[0] if isinstance(out, tuple) else out).reshape(len(q_THd), -1)
