"""Which keys an indexer chooses for each token. In: queries, weights of heads, keys in the cache. Out: positions. Never attends.

Shapes: T tokens, B rows, N heads, d head size, Q queries of a row, C keys, K chosen keys.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import TILE_ROWS, Arithmetic
from batchgen.kv_cache import Store
from batchgen.packing import PackedBatch

FIXED_KEYS = 128
"""Keys of a product in batch-invariant mode."""


def choose_keys(arithmetic: Arithmetic, q_TNd: Tensor, weights_TN: Tensor, store: Store, batch: PackedBatch, top_k: int) -> Tensor:
    """Positions of the keys with the highest sum over heads of weight * relu(q . k), up to each token's own: int64 [T, K], ascending,
    then -1. Of equal scores the first keys win. `weights_TN` is float32; `store` has one head (DeepSeek-V3.2, 2025)."""
    if arithmetic.cpu_kernels is not None:
        rows = (batch.page_table_BP, batch.rows(), batch.positions_T)
        return arithmetic.cpu_kernels.choose_keys(q_TNd, weights_TN, store.k_PHSD, *rows, top_k)
    lens = [end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    chosen = []
    per_row = zip(*(torch.split(each, lens) for each in (q_TNd, weights_TN, batch.positions_T)), batch.page_table_BP, strict=True)
    for q_QNd, weights_QN, positions_Q, pages_P in per_row:
        num_pages = int(positions_Q[-1]) // store.page_size + 1
        k_Cd = store.gather(pages_P[:num_pages], q_TNd.dtype)[0].view(-1, q_TNd.shape[2])
        scores_QC = _tiled_scores(q_QNd, weights_QN, k_Cd) if arithmetic.tiled else _scores(q_QNd, weights_QN, k_Cd)
        chosen.append(_best(scores_QC, positions_Q, top_k))
    width = max(each.shape[1] for each in chosen)
    return torch.cat([F.pad(each, (0, width - each.shape[1]), value=-1) for each in chosen])


def choose_pools(
    arithmetic: Arithmetic, q_TNd: Tensor, weights_TN: Tensor, store: Store, batch: PackedBatch, top_k: int, gate_bias_Pd: Tensor
) -> Tensor:
    """As `choose_keys`, of pools of P consecutive keys: a pool's key is the mean of its keys, weighted in each dimension by a softmax of
    their gates, which the store has as values, plus `gate_bias_Pd`. A token sees all of the pools chosen from those that end by its own
    position, top_k / P of them, and what comes after the last of these."""
    size = len(gate_bias_Pd)
    chosen = []
    lens = [end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    per_row = zip(*(torch.split(each, lens) for each in (q_TNd, weights_TN, batch.positions_T)), batch.page_table_BP, strict=True)
    for q_QNd, weights_QN, positions_Q, pages_P in per_row:
        num_keys = int(positions_Q[-1]) + 1
        k_Cd, gates_Cd = (x.reshape(-1, q_TNd.shape[2]) for x in store.gather(pages_P[: -(-num_keys // store.page_size)], torch.float32))
        num_pools = num_keys // size
        k_CPd, gates_CPd = (x[: num_pools * size].view(num_pools, size, q_TNd.shape[2]) for x in (k_Cd, gates_Cd))
        pools_Cd = ((gates_CPd + gate_bias_Pd).softmax(dim=1) * k_CPd).sum(dim=1).to(q_TNd.dtype)
        scores_QC = _pool_scores(arithmetic, q_QNd, weights_QN, pools_Cd)
        best_QK = _best(scores_QC, (positions_Q + 1) // size - 1, top_k // size)
        keys_QK = (best_QK.unsqueeze(2) * size + torch.arange(size, device=best_QK.device)).masked_fill(best_QK.unsqueeze(2) < 0, num_keys)
        tail_QP = ((positions_Q + 1) // size * size).unsqueeze(1) + torch.arange(size - 1, device=best_QK.device)
        tail_QP = tail_QP.masked_fill(tail_QP > positions_Q.unsqueeze(1), num_keys)
        seen_QK = torch.cat((keys_QK.flatten(1), tail_QP), dim=1).sort(dim=1).values
        chosen.append(seen_QK.masked_fill(seen_QK == num_keys, -1))
    width = max(each.shape[1] for each in chosen)
    return torch.cat([F.pad(each, (0, width - each.shape[1]), value=-1) for each in chosen])


def _pool_scores(arithmetic: Arithmetic, q_QNd: Tensor, weights_QN: Tensor, pools_Cd: Tensor) -> Tensor:
    if arithmetic.cpu_kernels is None:
        return _tiled_scores(q_QNd, weights_QN, pools_Cd) if arithmetic.tiled else _scores(q_QNd, weights_QN, pools_Cd)
    products_QNC = arithmetic.linear(q_QNd.flatten(0, 1), pools_Cd).relu_().view(*q_QNd.shape[:2], len(pools_Cd))
    return (weights_QN.unsqueeze(2) * products_QNC).sum(dim=1)


def _scores(q_QNd: Tensor, weights_QN: Tensor, k_Cd: Tensor) -> Tensor:
    products_QNC = (q_QNd.flatten(0, 1).float() @ k_Cd.float().T).relu_().view(*q_QNd.shape[:2], -1)
    return torch.bmm(weights_QN.unsqueeze(1), products_QNC)[:, 0]


def _tiled_scores(q_QNd: Tensor, weights_QN: Tensor, k_Cd: Tensor) -> Tensor:
    """The same by products of one shape."""
    num_queries, num_keys = len(q_QNd), len(k_Cd)
    q_QNd, weights_QN = F.pad(q_QNd, (0, 0, 0, 0, 0, -num_queries % TILE_ROWS)), F.pad(weights_QN, (0, 0, 0, -num_queries % TILE_ROWS))
    blocks = torch.split(F.pad(k_Cd, (0, 0, 0, -num_keys % FIXED_KEYS)), FIXED_KEYS)
    tiles = zip(torch.split(q_QNd, TILE_ROWS), torch.split(weights_QN, TILE_ROWS), strict=True)
    return torch.cat([torch.cat([_scores(*tile, block) for block in blocks], dim=1) for tile in tiles])[:num_queries, :num_keys]


def _best(scores_QC: Tensor, positions_Q: Tensor, top_k: int) -> Tensor:
    """int64 [Q, K]"""
    places_C = torch.arange(scores_QC.shape[1], device=scores_QC.device)
    hidden_QC = places_C > positions_Q[:, None]
    order_QK = scores_QC.masked_fill(hidden_QC, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    beyond = scores_QC.shape[1]
    order_QK = order_QK.masked_fill(hidden_QC.gather(1, order_QK), beyond).sort(dim=1).values
    return order_QK.masked_fill(order_QK == beyond, -1)
