"""Choose tokens. In: logits, probabilities, filters and one uniform a row. Out: token ids. Each row's result depends on that row alone.

Every draw is an inverse CDF. Unfiltered rows run through the vocabulary in id order in two levels (blocks, then inside one block);
rows with top_k or top_p run through their most likely tokens, most likely first. Equal logits rank by id, lowest first.

Shapes: B (or R) rows, V vocabulary, N blocks of S ids each, K most likely tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_PREFIX = 64
"""Ranked tokens looked at first for top_p; rows whose nucleus is larger look at PREFIX_GROWTH times as many, and so on."""
PREFIX_GROWTH = 8
_LARGEST_UNIFORM = 1.0 - 2.0**-53


@dataclass(slots=True, kw_only=True)
class Filters:
    """Applied in this order."""

    top_k_R: Tensor
    """int64; V is off."""
    top_p_R: Tensor
    """float64; 1 is off."""
    min_p_R: Tensor
    """float64; 0 is off."""

    def take(self, rows: Tensor) -> "Filters":
        return Filters(top_k_R=self.top_k_R[rows], top_p_R=self.top_p_R[rows], min_p_R=self.min_p_R[rows])


def greedy(logits_BV: Tensor) -> Tensor:
    """Id of the largest logit, the lowest of equals. int64 [B]."""
    logits_BNS = _blocks(logits_BV, -math.inf)
    block_B = logits_BNS.amax(-1).argmax(-1)
    return block_B * logits_BNS.shape[2] + _pick_block(logits_BNS, block_B).argmax(-1)


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One id a row with probability proportional to probs_BV (>= 0, float32); never an id of probability 0. int64 [B].

    Rows with NaN give an arbitrary valid id.
    """
    probs_BNS = _blocks(probs_BV, 0.0)
    mass_BN = probs_BNS.sum(-1).double()
    upper_BN = mass_BN.cumsum(-1)
    target_B = uniform_B * upper_BN[:, -1]
    block_B = _first_above(upper_BN, target_B)
    mass_B = _pick(mass_BN, block_B)
    inside_B = ((target_B - (_pick(upper_BN, block_B) - mass_B)) / mass_B).clamp(0.0, _LARGEST_UNIFORM)
    upper_BS = _pick_block(probs_BNS, block_B).double().cumsum(-1)
    return block_B * probs_BNS.shape[2] + _first_above(upper_BS, inside_B * upper_BS[:, -1])


def draw_ranked(logits_RV: Tensor, probs_RV: Tensor, uniform_R: Tensor, filters: Filters, prefix: int) -> Tensor:
    """One id a row from its most likely tokens. int64 [R].

    `prefix` is how many ranked tokens to look at first, at least every top_k that is on. It changes the time, not the result.
    """
    vocab = logits_RV.shape[1]
    sorted_RC, ids_RC, count_R = _leaders(logits_RV, min(prefix, vocab))
    width = sorted_RC.shape[1]
    probs_RC = probs_RV.gather(1, ids_RC).double().masked_fill_(sorted_RC == -math.inf, 0.0)
    upper_RC = probs_RC.cumsum(1)
    limited_R = filters.top_k_R < vocab
    total_R = torch.where(limited_R, _pick(upper_RC, filters.top_k_R.clamp(max=width) - 1), 1.0)
    before_RC = torch.nn.functional.pad(upper_RC[:, :-1], (1, 0))
    keep_RC = torch.arange(width, device=ids_RC.device) < torch.minimum(filters.top_k_R, count_R)[:, None]
    keep_RC &= (before_RC < (filters.top_p_R * total_R)[:, None]) | (filters.top_p_R == 1.0)[:, None]
    keep_RC &= probs_RC >= filters.min_p_R[:, None] * probs_RC[:, :1]
    kept_R = keep_RC.sum(1)
    target_R = uniform_R * _pick(upper_RC, kept_R.clamp(min=1) - 1)
    tokens_R = _pick(ids_RC, _first_above(upper_RC, target_R))
    open_R = (kept_R == count_R) & (count_R >= prefix) & ~limited_R
    if prefix < vocab and bool(open_R.any()):
        rows = open_R.nonzero().squeeze(1)
        wider_R = draw_ranked(logits_RV[rows], probs_RV[rows], uniform_R[rows], filters.take(rows), prefix * PREFIX_GROWTH)
        tokens_R[rows] = wider_R
    return tokens_R


def ranked(logits_RV: Tensor, k: int) -> Tensor:
    """The k ids of largest logits, largest first, equals by id. int64 [R, k]."""
    if k == 0:
        return torch.zeros(len(logits_RV), 0, dtype=torch.int64, device=logits_RV.device)
    _, ids_RC, count_R = _leaders(logits_RV, k)
    ids_RK = ids_RC[:, :k]
    short_R = count_R < k
    if bool(short_R.any()):
        ids_RK[short_R] = logits_RV[short_R].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return ids_RK


def _leaders(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and ids [R, C] of at least the k largest logits above -inf, largest first, equals by id; and how many they are, [R].

    C >= k; beyond its count a row is padded with logit -inf, id 0. A row's count is k or more unless fewer are above -inf, and every
    id left out is below all that are in. Found without sorting the row: of at least 2k groups of logits the k-th largest maximum
    bounds the k-th largest logit from below, and few logits are above it.
    """
    rows, vocab = logits_RV.shape
    size = 1 << (vocab // (2 * k)).bit_length() - 1 if vocab >= 4 * k else 1
    if size == 1:
        count_R = (logits_RV > -math.inf).sum(1)
        return *logits_RV.sort(dim=1, descending=True, stable=True), count_R
    groups = vocab // size
    maxima_RG = logits_RV[:, : groups * size].unflatten(1, (size, groups)).amax(1)
    bound_R1 = maxima_RG.topk(k).values[:, -1:].clamp(min=torch.finfo(torch.float32).min)
    row_E, id_E = (logits_RV >= bound_R1).nonzero(as_tuple=True)
    count_R = torch.bincount(row_E, minlength=rows)
    column_E = torch.arange(len(row_E), device=row_E.device) - (count_R.cumsum(0) - count_R)[row_E]
    width = max(k, int(count_R.max()))
    leaders_RC = logits_RV.new_full((rows, width), -math.inf)
    leaders_RC[row_E, column_E] = logits_RV[row_E, id_E]
    ids_RC = torch.zeros_like(leaders_RC, dtype=torch.int64)
    ids_RC[row_E, column_E] = id_E
    sorted_RC, order_RC = leaders_RC.sort(dim=1, descending=True, stable=True)
    return sorted_RC, ids_RC.gather(1, order_RC), count_R


def _blocks(x_BV: Tensor, fill: float) -> Tensor:
    """[B, N, S] view of the rows in id order, padded with `fill` where S does not divide V; S is a power of two near sqrt(V)."""
    rows, vocab = x_BV.shape
    size = 1 << (vocab.bit_length() + 1) // 2
    if vocab % size:
        x_BV = torch.nn.functional.pad(x_BV, (0, size - vocab % size), value=fill)
    return x_BV.reshape(rows, x_BV.shape[1] // size, size)


def _pick(x_BN: Tensor, index_B: Tensor) -> Tensor:
    return x_BN.gather(1, index_B[:, None]).squeeze(1)


def _pick_block(x_BNS: Tensor, block_B: Tensor) -> Tensor:
    return x_BNS[torch.arange(len(block_B), device=block_B.device), block_B]


def _first_above(upper_BN: Tensor, target_B: Tensor) -> Tensor:
    """Index of the first cumulative value above the target."""
    return (upper_BN <= target_B[:, None]).sum(1).clamp(max=upper_BN.shape[1] - 1)
