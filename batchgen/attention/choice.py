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
