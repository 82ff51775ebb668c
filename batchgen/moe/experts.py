"""The experts' products. In: activations and the router's choice. Out: each token's weighted sum of its experts. Never chooses experts.

Shapes: T tokens, K experts per token, E experts, G experts of a block, D model, F expert width, R rows of the expert batch, N outputs.
"""

import torch
from torch import Tensor

from batchgen.arithmetic import TILE_ROWS, Arithmetic
from batchgen.huge_pages import empty_huge
from batchgen.moe.activation import SILU, Activation
from batchgen.moe.dispatch import dispatch
from batchgen.moe.expert_sum import ExpertSum

BLOCK_EXPERTS = 4
"""Experts multiplied in one padded batch while each has few rows."""
BLOCK_MAX_ROWS = 32
"""Mean rows per expert above which they are multiplied one by one, without padding."""


class Experts:
    """Stacked weights of one layer's experts, gate and up projections fused."""

    def __init__(self, num_experts: int, size: int, width: int, arithmetic: Arithmetic, activation: Activation = SILU, bias: bool = False):
        self.arithmetic, self.activation = arithmetic, activation
        self.num_experts = num_experts

        def storage(*shape: int) -> Tensor:
            return empty_huge((num_experts, *shape), arithmetic.storage_dtype, arithmetic.device)

        self.gate_up_EFD, self.down_EDF = storage(2 * width, size), storage(size, width)
        self.biases = (storage(2 * width), storage(size)) if bias else None
        """Of the fused projections [E, F] and of the last [E, D]."""

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | ExpertSum:
        """Weighted sum of each token's K experts, [T, D], or what will be it."""
        kernels = self.arithmetic.kernels
        if kernels is not None and kernels.takes_experts(self.activation, self.biases is not None):
            weights = (self.gate_up_EFD, self.down_EDF)
            return kernels.experts(x_TD, *weights, ids_TK, weights_TK, self.activation, self.biases)
        if self.arithmetic.deterministic:
            return self.arithmetic.tokenwise(_combine, self._tiled(x_TD, ids_TK), weights_TK)[0]
        return _combine(self._blocked(x_TD, ids_TK), weights_TK)[0]

    def _blocked(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        few_rows = ids_TK.numel() <= BLOCK_MAX_ROWS * self.num_experts
        block = BLOCK_EXPERTS if few_rows and self.num_experts % BLOCK_EXPERTS == 0 else 1
        batch = dispatch(ids_TK, self.num_experts, block=block, multiple=1)
        bias_EF, bias_ED = self.biases or (None, None)
        gate_up_RF = self._block_products(x_TD.index_select(0, batch.token_R), self.gate_up_EFD, bias_EF, batch.rows_E, block)
        hidden_RF = self.arithmetic.gate(gate_up_RF, self.activation)
        return self._block_products(hidden_RF, self.down_EDF, bias_ED, batch.rows_E, block)[batch.row_TK]

    def _block_products(self, x_RD: Tensor, weight_END: Tensor, bias_EN: Tensor | None, rows_E: list[int], block: int) -> Tensor:
        y_RN = x_RD.new_empty(x_RD.shape[0], weight_END.shape[1])
        start = 0
        for first in range(0, self.num_experts, block):
            if rows_E[first] == 0:
                continue
            end = start + rows_E[first] * block
            weight, y_GRN = self.arithmetic.widen(weight_END[first : first + block]), y_RN[start:end].view(block, -1, y_RN.shape[1])
            torch.bmm(x_RD[start:end].view(block, -1, x_RD.shape[1]), weight.mT, out=y_GRN)
            if bias_EN is not None:
                y_GRN += bias_EN[first : first + block, None].to(y_GRN.dtype)
            start = end
        return y_RN

    def _tiled(self, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
        batch = dispatch(ids_TK, self.num_experts, block=1, multiple=TILE_ROWS)
        x_RD = x_TD.index_select(0, batch.token_R)
        y_RD = torch.empty_like(x_RD)
        expert_of_tile = [expert for expert, rows in enumerate(batch.rows_E) for _ in range(rows // TILE_ROWS)]
        for x_tile, y_tile, expert in zip(torch.split(x_RD, TILE_ROWS), torch.split(y_RD, TILE_ROWS), expert_of_tile, strict=True):
            gate_up_bias, down_bias = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
            h_tile = self.arithmetic.gate(self.arithmetic.linear(x_tile, self.gate_up_EFD[expert], gate_up_bias), self.activation)
            y_tile.copy_(self.arithmetic.linear(h_tile, self.down_EDF[expert], down_bias))
        return y_RD[batch.row_TK]


def _combine(y_TKD: Tensor, weights_TK: Tensor) -> tuple[Tensor]:
    """Weighted sum over a token's experts, in the router's order."""
    return (torch.bmm(weights_TK.to(y_TKD.dtype).unsqueeze(1), y_TKD).squeeze(1),)
