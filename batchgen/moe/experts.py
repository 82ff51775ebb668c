"""The experts' products. In: activations and the router's choice. Out: each token's weighted sum of its experts. Never chooses experts.

Shapes: T tokens, K experts per token, E experts, G experts of a block, D model, F expert width, R rows of the expert batch, N outputs.
"""

import torch
from torch import Tensor

from batchgen.arithmetic import TILE_ROWS, Arithmetic
from batchgen.models.blocks import empty_weight, gated_silu
from batchgen.moe.dispatch import dispatch
from batchgen.moe.expert_sum import ExpertSum

BLOCK_EXPERTS = 4
"""Experts multiplied in one padded batch while each has few rows."""
BLOCK_MAX_ROWS = 32
"""Mean rows per expert above which they are multiplied one by one, without padding."""


class Experts:
    """Stacked weights of one layer's experts, gate and up projections fused."""

    def __init__(self, num_experts: int, hidden_size: int, width: int, arithmetic: Arithmetic):
        self.arithmetic = arithmetic
        self.num_experts = num_experts
        self.gate_up_EFD = empty_weight(arithmetic, num_experts, 2 * width, hidden_size)
        self.down_EDF = empty_weight(arithmetic, num_experts, hidden_size, width)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | ExpertSum:
        """Weighted sum of each token's K experts, [T, D], or what will be it."""
        if self.arithmetic.kernels is not None:
            return self.arithmetic.kernels.experts(x_TD, self.gate_up_EFD, self.down_EDF, ids_TK, weights_TK)
        if self.arithmetic.deterministic:
            return self.arithmetic.tokenwise(_combine, self._tiled(x_TD, ids_TK), weights_TK)[0]
        return _combine(self._blocked(x_TD, ids_TK), weights_TK)[0]

    def _blocked(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        few_rows = ids_TK.numel() <= BLOCK_MAX_ROWS * self.num_experts
        block = BLOCK_EXPERTS if few_rows and self.num_experts % BLOCK_EXPERTS == 0 else 1
        batch = dispatch(ids_TK, self.num_experts, block=block, multiple=1)
        h_RF = gated_silu(self._block_products(x_TD.index_select(0, batch.token_R), self.gate_up_EFD, batch.rows_E, block))
        return self._block_products(h_RF, self.down_EDF, batch.rows_E, block)[batch.row_TK]

    def _block_products(self, x_RD: Tensor, weight_END: Tensor, rows_E: list[int], block: int) -> Tensor:
        y_RN = x_RD.new_empty(x_RD.shape[0], weight_END.shape[1])
        start = 0
        for first in range(0, self.num_experts, block):
            if rows_E[first] == 0:
                continue
            end = start + rows_E[first] * block
            weight = self.arithmetic.widen(weight_END[first : first + block])
            torch.bmm(x_RD[start:end].view(block, -1, x_RD.shape[1]), weight.mT, out=y_RN[start:end].view(block, -1, y_RN.shape[1]))
            start = end
        return y_RN

    def _tiled(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        batch = dispatch(ids_TK, self.num_experts, block=1, multiple=TILE_ROWS)
        x_RD = x_TD.index_select(0, batch.token_R)
        y_RD = torch.empty_like(x_RD)
        expert_of_tile = [expert for expert, rows in enumerate(batch.rows_E) for _ in range(rows // TILE_ROWS)]
        for x_tile, y_tile, expert in zip(torch.split(x_RD, TILE_ROWS), torch.split(y_RD, TILE_ROWS), expert_of_tile, strict=True):
            h_tile = gated_silu(self.arithmetic.linear(x_tile, self.gate_up_EFD[expert]))
            y_tile.copy_(self.arithmetic.linear(h_tile, self.down_EDF[expert]))
        return y_RD[batch.row_TK]


def _combine(y_TKD: Tensor, weights_TK: Tensor) -> tuple[Tensor]:
    """Weighted sum over a token's experts, in the router's order."""
    return (torch.bmm(weights_TK.to(y_TKD.dtype).unsqueeze(1), y_TKD).squeeze(1),)
