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
    logits_BNS = _blocks(logits_BV, -math.inf, _block_size(logits_BV.shape[1]))
    block_B = logits_BNS.amax(-1).argmax(-1)
    return block_B * logits_BNS.shape[2] + _pick_block(logits_BNS, block_B).argmax(-1)


def draw(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """One id a row with probability proportional to probs_BV (>= 0, float32); never an id of probability 0. int64 [B].

    Rows with NaN give an arbitrary valid id.
    """
    probs_BNS = _blocks(probs_BV, 0.0, _block_size(probs_BV.shape[1]))
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
    prefix = min(prefix, vocab)
    ids_RK = ranked(logits_RV, prefix)
    probs_RK = probs_RV.gather(1, ids_RK).double()
    upper_RK = probs_RK.cumsum(1)
    limited_R = filters.top_k_R <= prefix
    total_R = torch.where(limited_R, _pick(upper_RK, filters.top_k_R.clamp(max=prefix) - 1), 1.0)
    before_RK = torch.nn.functional.pad(upper_RK[:, :-1], (1, 0))
    keep_RK = torch.arange(prefix, device=ids_RK.device) < filters.top_k_R[:, None]
    keep_RK &= (before_RK < (filters.top_p_R * total_R)[:, None]) | (filters.top_p_R == 1.0)[:, None]
    keep_RK &= probs_RK >= filters.min_p_R[:, None] * probs_RK[:, :1]
    kept_R = keep_RK.sum(1).clamp(min=1)
    target_R = uniform_R * _pick(upper_RK, kept_R - 1)
    tokens_R = _pick(ids_RK, _first_above(upper_RK, target_R))
    open_R = (kept_R == prefix) & ~limited_R & (probs_RK[:, -1] > 0.0)
    if prefix < vocab and bool(open_R.any()):
        rows = open_R.nonzero().squeeze(1)
        wider_R = draw_ranked(logits_RV[rows], probs_RV[rows], uniform_R[rows], filters.take(rows), prefix * PREFIX_GROWTH)
        tokens_R[rows] = wider_R
    return tokens_R


def ranked(logits_RV: Tensor, k: int) -> Tensor:
    """The k ids of largest logits, largest first, equals by id. int64 [R, k].

    They lie in the k groups of consecutive ids with the largest maxima (equals by place): an id of another group would have k maxima
    before it. So two short searches replace one over the vocabulary.
    """
    vocab = logits_RV.shape[1]
    size = 1 << math.isqrt(vocab // max(k, 1)).bit_length() - 1 if k < vocab // 4 else 1
    if size == 1:
        return _leaders(logits_RV, torch.arange(vocab, device=logits_RV.device), k)
    groups_RGS = _blocks(logits_RV, -math.inf, size)
    num_groups = groups_RGS.shape[1]
    group_RK = _leaders(groups_RGS.amax(2), torch.arange(num_groups, device=logits_RV.device), k)
    index_RK1 = group_RK[..., None]
    ids_RC = (index_RK1 * size + torch.arange(size, device=logits_RV.device)).flatten(1)
    logits_RC = groups_RGS.gather(1, index_RK1.expand(-1, -1, size)).flatten(1)
    return ids_RC.gather(1, _leaders(logits_RC, ids_RC, k))


def _leaders(logits_RC: Tensor, ids_RC: Tensor, k: int) -> Tensor:
    """Columns of the k largest logits, equals by lowest id. int64 [R, k].

    Ranks 64-bit keys made of the logit's order-preserving bits and its id. All keys differ, so no tie is left to the algorithm.
    """
    bits_RC = (logits_RC + 0.0).view(torch.int32)  # adding 0 makes -0.0 equal to 0.0
    order_RC = bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF)
    return ((order_RC.long() << 32) - ids_RC).topk(k).indices


def _blocks(x_BV: Tensor, fill: float, size: int) -> Tensor:
    """[B, N, S] view of the rows in id order, S = size, padded with `fill` where S does not divide V."""
    rows, vocab = x_BV.shape
    if vocab % size:
        x_BV = torch.nn.functional.pad(x_BV, (0, size - vocab % size), value=fill)
    return x_BV.reshape(rows, x_BV.shape[1] // size, size)


def _block_size(vocab: int) -> int:
    """A power of two near the square root."""
    return 1 << (vocab.bit_length() + 1) // 2


def _pick(x_BN: Tensor, index_B: Tensor) -> Tensor:
    return x_BN.gather(1, index_B[:, None]).squeeze(1)


def _pick_block(x_BNS: Tensor, block_B: Tensor) -> Tensor:
    return x_BNS[torch.arange(len(block_B), device=block_B.device), block_B]


def _first_above(upper_BN: Tensor, target_B: Tensor) -> Tensor:
    """Index of the first cumulative value above the target."""
    return (upper_BN <= target_B[:, None]).sum(1).clamp(max=upper_BN.shape[1] - 1)
