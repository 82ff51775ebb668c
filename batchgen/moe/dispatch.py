"""Sorting tokens by expert. In: expert ids per token. Out: which token each row of the expert batch holds. Never touches activations.

Consecutive experts form blocks that are multiplied together, so all experts of a block get as many rows as its fullest one; rows beyond
an expert's own tokens hold token 0 and are never read back.

Shapes: T tokens, K experts per token, E experts, R rows of the expert batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class ExpertBatch:
    """The rows of one step, experts in order."""

    token_R: Tensor
    """int64, token of each row."""
    row_TK: Tensor
    """int64, row of each token's k-th expert."""
    rows_E: list[int]
    """Rows of each expert, padding included."""


def dispatch(ids_TK: Tensor, num_experts: int, *, block: int, multiple: int) -> ExpertBatch:
    """Give every (token, expert) pair a row. Experts of a block of `block` get equally many rows, a multiple of `multiple`."""
    num_experts_per_tok = ids_TK.shape[1]
    ids_N = ids_TK.reshape(-1)
    sorted_N, order_N = ids_N.sort(stable=True)
    counts_E = torch.bincount(ids_N, minlength=num_experts)
    rows_E = -(-counts_E // multiple) * multiple
    if block > 1:
        rows_E = rows_E.view(-1, block).amax(1).repeat_interleave(block)
    shift_E = (rows_E.cumsum(0) - rows_E) - (counts_E.cumsum(0) - counts_E)
    row_N = torch.arange(ids_N.numel(), device=ids_N.device) + shift_E[sorted_N]
    token_R = torch.zeros(int(rows_E.sum()), dtype=torch.int64, device=ids_N.device)
    token_R[row_N] = order_N // num_experts_per_tok
    row_TK = torch.empty_like(ids_N).scatter_(0, order_N, row_N).view_as(ids_TK)
    return ExpertBatch(token_R=token_R, row_TK=row_TK, rows_E=rows_E.tolist())
