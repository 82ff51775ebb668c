"""Attention over paged KV in plain torch. In: queries, the KV cache, a plan of the packed batch. Out: attention outputs. Never writes KV.

Each row of the batch is cut into tiles of queries; tiles that see similarly many keys form a bucket, whose pages are gathered and
multiplied together. The query heads that share a KV head are folded into the query dimension. Batch-invariant mode uses tiles, buckets
and key blocks of one fixed shape, so a query meets the same kernels in the same order as a decode row and inside any prefill chunk.

Shapes: T tokens, N tiles of a bucket, Q queries of a tile, H KV heads, G query heads per KV head, d key size, V value size, C keys,
P pages, K chosen keys.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.kv_cache import KVCache, Store
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
    positions_NQ: Tensor
    pages_NP: Tensor
    num_keys: int
    _page_heads: dict[int, Tensor] = field(default_factory=dict)
    _hidden: dict[int, Tensor] = field(default_factory=dict)

    def page_heads(self, num_heads: int) -> Tensor:
        """int64 rows of a store's pages seen as [pages * H, page_size * d], flattened over N, H and P."""
        if num_heads not in self._page_heads:
            heads_H1 = torch.arange(num_heads, device=self.pages_NP.device)[:, None]
            self._page_heads[num_heads] = (self.pages_NP[:, None] * num_heads + heads_H1).reshape(-1)
        return self._page_heads[num_heads]

    def hidden(self, window: int, chosen_TK: Tensor | None) -> Tensor:
        """bool [N, Q, C], True where a query must not see the key."""
        if window not in self._hidden:
            ahead_NQC = torch.arange(self.num_keys, device=self.pages_NP.device) - self.positions_NQ.unsqueeze(-1)
            self._hidden[window] = (ahead_NQC > 0) | (ahead_NQC <= -window) if window else ahead_NQC > 0
        if chosen_TK is None:
            return self._hidden[window]
        chosen_NQK = chosen_TK[self.query_NQ]
        others = chosen_NQK.new_ones((*chosen_NQK.shape[:2], self.num_keys + 1), dtype=torch.bool)
        others.scatter_(2, torch.where((chosen_NQK < 0) | (chosen_NQK > self.num_keys), self.num_keys, chosen_NQK), False)
        return self._hidden[window] | others[..., :-1]


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

    def attend(
        self,
        q_THGd: Tensor,
        store: Store,
        plan: AttentionPlan,
        scale: float,
        *,
        window: int = 0,
        sinks_N: Tensor | None = None,
        chosen_TC: Tensor | None = None,
    ) -> Tensor:
        """Outputs [T, H * G * V] of the batch's tokens."""
        q_THGd = q_THGd * scale
        sinks_HG = None if sinks_N is None else sinks_N.view(q_THGd.shape[1:3]).to(q_THGd.dtype)
        outputs = [
            _attend_bucket(q_THGd, store, bucket, bucket.hidden(window, chosen_TC), sinks_HG, plan.key_block) for bucket in plan.buckets
        ]
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
        most = max(1, BUCKET_ELEMENTS // (longest * max(shape.num_heads * shape.key_dim for shape in kv.layout.pages)))
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
    return Bucket(query_NQ=query, positions_NQ=batch.positions_T[query], pages_NP=pages_NP, num_keys=num_keys)


def _attend_bucket(
    q_THGd: Tensor, store: Store, bucket: Bucket, hidden_NQC: Tensor, sinks_HG: Tensor | None, key_block: int | None
) -> Tensor:
    num_tiles, num_queries = bucket.query_NQ.shape
    _, num_heads, group, size = q_THGd.shape
    folded = (num_tiles * num_heads, num_queries * group, size)
    q_BMd = q_THGd[bucket.query_NQ].transpose(1, 2).reshape(folded)
    gathered = store.gather(bucket.page_heads(num_heads), q_BMd.dtype)
    k_BCd, v_BCV = (rows.view(folded[0], -1, rows.shape[-1]) for rows in gathered)
    block = key_block or bucket.num_keys
    blocks = [torch.bmm(q_BMd, k.mT) for k in torch.split(k_BCd, block, dim=1)]
    scores_BMC = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)
    scores = scores_BMC.view(num_tiles, num_heads, num_queries, group, -1)
    scores.masked_fill_(hidden_NQC[:, None, :, None], float("-inf"))
    probabilities_BMC = _softmax(scores, sinks_HG, key_block or 1).view(*folded[:2], -1).to(q_BMd.dtype)
    parts = zip(torch.split(probabilities_BMC, block, dim=2), torch.split(v_BCV, block, dim=1), strict=True)
    out_BMV, *rest = (torch.bmm(p.contiguous(), v) for p, v in parts)
    for part in rest:
        out_BMV = out_BMV + part
    return out_BMV.view(num_tiles, num_heads, num_queries, -1).transpose(1, 2).reshape(num_tiles * num_queries, -1)


def _softmax(scores_NHQGC: Tensor, sinks_HG: Tensor | None, padding: int) -> Tensor:
    """float32 probabilities. Sinks take their part as the first of `padding` columns in front, which are dropped again."""
    if sinks_HG is None:
        return torch.softmax(scores_NHQGC.float(), dim=-1)
    front = scores_NHQGC.new_full((*scores_NHQGC.shape[:-1], padding), float("-inf"))
    front[..., 0] = sinks_HG[:, None]
    return torch.softmax(torch.cat((front, scores_NHQGC), dim=-1).float(), dim=-1)[..., padding:].contiguous()
