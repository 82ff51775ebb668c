"""Attention over paged KV in plain torch. In: queries, the KV cache, a plan of the packed batch. Out: attention outputs. Never writes KV.

Each row of the batch is cut into tiles of queries; tiles that see similarly many keys form a bucket, whose pages are gathered and
multiplied together. The query heads that share a KV head are folded into the query dimension. Batch-invariant mode uses tiles, buckets
and key blocks of one fixed shape, so a query meets the same kernels in the same order as a decode row and inside any prefill chunk.

Shapes: T tokens, N tiles of a bucket, Q queries of a tile, H KV heads, G query heads per KV head, d head size, C keys, P pages.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.kv_cache import KVCache
from batchgen.packing import PackedBatch

PREFILL_TILE = 64
"""Queries of a prefill tile."""
BUCKET_GROWTH = 1.25
"""A bucket's longest context over its shortest, at most (or one key block)."""
BUCKET_ELEMENTS = 1 << 19
"""Gathered keys (times heads times head size) of a bucket, at most: they should stay in cache."""
FIXED_TILE, FIXED_BUCKET, FIXED_KEYS = 4, 8, 128
"""Batch-invariant mode: queries of a tile, tiles of a bucket, keys of a block."""


@dataclass(slots=True, kw_only=True)
class Bucket:
    """Tiles computed together. Padding queries repeat a tile's last one; padding tiles repeat the bucket's last one."""

    query_NQ: Tensor
    """int64 indices into T."""
    page_heads_NHP: Tensor
    """int64 rows of a layer's KV seen as [pages * H, page_size * d], flattened."""
    hidden_NQC: Tensor
    """bool, True where a query must not see the key."""
    num_keys: int


@dataclass(slots=True, kw_only=True)
class AttentionPlan:
    """The buckets of one forward pass, used by every layer."""

    buckets: list[Bucket]
    output_T: Tensor
    """Row of each token among the concatenated outputs of all buckets."""
    key_block: int | None
    """Keys multiplied at a time; None: all of a bucket's."""


@dataclass(slots=True, kw_only=True)
class ReferenceAttention:
    """Gathered keys and batched products."""

    deterministic: bool
    max_shared_rows: int = 0

    def plan(self, batch: PackedBatch, kv: KVCache) -> AttentionPlan:
        """The batch, cut into buckets of tiles; clears the pages that it begins, for masked keys are multiplied too."""
        kv.begin_pages(batch.kv_slots_T)
        return _plan(batch, kv, self.deterministic)

    def attend(self, q_THGd: Tensor, kv: KVCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Outputs [T, H * G * d] of the batch's tokens."""
        q_THGd = q_THGd * scale
        outputs = [_attend_bucket(q_THGd, kv, layer, bucket, plan.key_block or bucket.num_keys) for bucket in plan.buckets]
        return torch.cat(outputs).index_select(0, plan.output_T)


def _plan(batch: PackedBatch, kv: KVCache, deterministic: bool) -> AttentionPlan:
    starts_B = np.asarray(batch.query_starts[:-1], dtype=np.int64)
    lens_B = np.diff(np.asarray(batch.query_starts, dtype=np.int64))
    contexts_B = batch.context_lens_B.cpu().numpy()
    ordinary = [(0, batch.num_decode, 1), (batch.num_decode, len(lens_B), PREFILL_TILE)]
    spans = [(0, len(lens_B), FIXED_TILE)] if deterministic else ordinary
    buckets: list[Bucket] = []
    output_T = np.empty(int(lens_B.sum()), dtype=np.int64)
    num_outputs = 0
    for first, last, tile in spans:
        rows_N, query_NQ, keys_N = _cut_tiles(starts_B[first:last], lens_B[first:last], contexts_B[first:last], tile)
        for chosen in _group(keys_N, kv, deterministic):
            query = query_NQ[chosen]
            output_T[query.reshape(-1)] = num_outputs + np.arange(query.size)
            num_outputs += query.size
            buckets.append(_make_bucket(batch, kv, first + rows_N[chosen], query, int(keys_N[chosen].max()), deterministic))
    return AttentionPlan(
        buckets=buckets,
        output_T=torch.from_numpy(output_T).to(batch.positions_T.device),
        key_block=FIXED_KEYS if deterministic else None,
    )


def _cut_tiles(starts_B: np.ndarray, lens_B: np.ndarray, contexts_B: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row of each tile, its queries as indices into T (the last one repeated as padding), and how many keys its last query sees."""
    tiles_B = -(-lens_B // tile)
    rows_N = np.repeat(np.arange(len(lens_B)), tiles_B)
    nth_N = np.arange(len(rows_N)) - np.repeat(np.cumsum(tiles_B) - tiles_B, tiles_B)
    ends_N = np.minimum((nth_N + 1) * tile, lens_B[rows_N])
    within_NQ = np.minimum(nth_N[:, None] * tile + np.arange(tile), ends_N[:, None] - 1)
    return rows_N, starts_B[rows_N, None] + within_NQ, contexts_B[rows_N] - lens_B[rows_N] + ends_N


def _group(keys_N: np.ndarray, kv: KVCache, deterministic: bool) -> list[np.ndarray]:
    """Tile numbers of each bucket: similar contexts together, longest first."""
    order_N = np.argsort(-keys_N, kind="stable")
    sorted_N = keys_N[order_N]
    groups = []
    start = 0
    while start < len(order_N):
        longest = int(sorted_N[start])
        if deterministic:
            chosen = order_N[start : start + FIXED_BUCKET]
            groups.append(np.concatenate((chosen, chosen[-1:].repeat(FIXED_BUCKET - len(chosen)))))
            start += FIXED_BUCKET
            continue
        shortest = min(longest / BUCKET_GROWTH, longest - FIXED_KEYS)
        most = max(1, BUCKET_ELEMENTS // (longest * kv.num_kv_heads * kv.head_dim))
        end = min(int(np.searchsorted(-sorted_N, -shortest, side="right")), start + most)
        groups.append(order_N[start:end])
        start = end
    return groups


def _make_bucket(batch: PackedBatch, kv: KVCache, rows_N: np.ndarray, query_NQ: np.ndarray, longest: int, deterministic: bool) -> Bucket:
    device = batch.positions_T.device
    step = max(FIXED_KEYS, kv.page_size) if deterministic else kv.page_size
    num_keys = -(-longest // step) * step
    query = torch.from_numpy(query_NQ).to(device)
    rows = torch.from_numpy(rows_N).to(device)
    own_pages_N = (batch.context_lens_B[rows] - 1) // kv.page_size
    nth_NP = torch.arange(num_keys // kv.page_size, device=device).minimum(own_pages_N[:, None])
    pages_NP = batch.page_table_BP[rows[:, None], nth_NP]
    heads_H1 = torch.arange(kv.num_kv_heads, device=device)[:, None]
    hidden_NQC = torch.arange(num_keys, device=device) > batch.positions_T[query].unsqueeze(-1)
    page_heads_NHP = (pages_NP[:, None] * kv.num_kv_heads + heads_H1).reshape(-1)
    return Bucket(query_NQ=query, page_heads_NHP=page_heads_NHP, hidden_NQC=hidden_NQC, num_keys=num_keys)


def _attend_bucket(q_THGd: Tensor, kv: KVCache, layer: int, bucket: Bucket, key_block: int) -> Tensor:
    num_tiles, num_queries = bucket.query_NQ.shape
    _, num_heads, group, size = q_THGd.shape
    folded = (num_tiles * num_heads, num_queries * group, size)
    q_BMd = q_THGd[bucket.query_NQ].transpose(1, 2).reshape(folded)
    k_BCd, v_BCd = (rows.view(folded[0], -1, size) for rows in kv.gather(layer, bucket.page_heads_NHP, q_BMd.dtype))
    blocks = [torch.bmm(q_BMd, k.mT) for k in torch.split(k_BCd, key_block, dim=1)]
    scores_BMC = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
    scores = scores_BMC.view(num_tiles, num_heads, num_queries, group, -1)
    scores.masked_fill_(bucket.hidden_NQC[:, None, :, None], float("-inf"))
    probabilities_BMC = torch.softmax(scores_BMC.float(), dim=-1).to(q_BMd.dtype)
    parts = zip(torch.split(probabilities_BMC, key_block, dim=2), torch.split(v_BCd, key_block, dim=1), strict=True)
    out_BMd, *rest = (torch.bmm(p.contiguous(), v) for p, v in parts)
    for part in rest:
        out_BMd = out_BMd + part
    return out_BMd.view(num_tiles, num_heads, num_queries, -1).transpose(1, 2).reshape(num_tiles * num_queries, -1)
