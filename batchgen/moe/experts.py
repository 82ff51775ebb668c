"""The experts' products. In: activations and the router's choice. Out: each token's weighted sum of its experts. Never chooses experts.

Shapes: T tokens, K experts per token, E experts, G experts of a block, D model, F expert width, R rows of the expert batch, N outputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen.arithmetic import TILE_ROWS, Arithmetic
from batchgen.huge_pages import empty_huge
from batchgen.moe.activation import SILU, Activation
from batchgen.moe.dispatch import dispatch
from batchgen.moe.expert_sum import ExpertSum
from batchgen.quant.format import Format
from batchgen.quant.packed import Packed

BLOCK_EXPERTS = 4
"""Experts multiplied in one padded batch while each has few rows."""
BLOCK_MAX_ROWS = 32
"""Mean rows per expert above which they are multiplied one by one, without padding."""


ExpertsSum = Callable[[Tensor, Tensor, Tensor], Tensor | ExpertSum]
"""Of x_TD, ids_TK and weights_TK."""


class Experts:
    """Stacked weights of one layer's experts: gate and up projections fused, or, packed, each a stack of its own."""

    def __init__(
        self,
        num_experts: int,
        size: int,
        width: int,
        arithmetic: Arithmetic,
        activation: Activation = SILU,
        bias: bool = False,
        form: Format | None = None,
    ):
        """`form`: of all of them; None: plain."""
        self.arithmetic, self.activation = arithmetic, activation
        self.num_experts = num_experts

        def storage(*shape: int) -> Tensor:
            return empty_huge((num_experts, *shape), arithmetic.storage_dtype, arithmetic.device)

        self.biases = (storage(2 * width), storage(size)) if bias else None
        """Of the fused projections [E, F] and of the last [E, D]."""
        self.gate_up_E2FD: Tensor | Packed
        """Gate and up apart, where they lie."""
        self.down_EDF: Tensor | Packed
        self.matrices: list[Tensor | Packed]
        """One expert's right operands."""
        if form is None:
            gate_up_EFD, down_EDF = storage(2 * width, size), storage(size, width)
            self.gate_up_E2FD, self.down_EDF = gate_up_EFD.view(num_experts, 2, width, size), down_EDF
            self.matrices = [gate_up_EFD[0], down_EDF[0]]
            self._sum = self._plain(gate_up_EFD, down_EDF)
        else:
            stacks = Packed(form, form.allocate((2, num_experts, width, size), arithmetic.device))
            down = Packed(form, form.allocate((num_experts, size, width), arithmetic.device))
            self.gate_up_E2FD, self.down_EDF = stacks.swapped(), down
            self.matrices = [stacks[0][0], stacks[1][0], down[0]]
            self._sum = self._packed(stacks[0], stacks[1], down)

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor | ExpertSum:
        """Weighted sum of each token's K experts, [T, D], or what will be it."""
        return self._sum(x_TD, ids_TK, weights_TK)

    def _plain(self, gate_up_EFD: Tensor, down_EDF: Tensor) -> ExpertsSum:
        """How the sum is computed here."""
        kernels, activation, biases = self.arithmetic.kernels, self.activation, self.biases
        if kernels is not None:
            return lambda x, ids, weights: kernels.experts(x, gate_up_EFD, down_EDF, ids, weights, activation, biases)
        if self.arithmetic.deterministic:
            return lambda x, ids, weights: self._combine(self._one_by_one(x, ids, [gate_up_EFD], down_EDF), weights)
        return lambda x, ids, weights: self._combine(self._blocked(x, ids, gate_up_EFD, down_EDF), weights)

    def _packed(self, gate_EFD: Packed, up_EFD: Packed, down_EDF: Packed) -> ExpertsSum:
        """How it is computed with packed weights."""
        kernels, activation, biases = self.arithmetic.cpu_kernels, self.activation, self.biases
        if kernels is not None:
            return lambda x, ids, weights: kernels.packed_experts(x, gate_EFD, up_EFD, down_EDF, ids, weights, activation, biases)
        return lambda x, ids, weights: self._combine(self._one_by_one(x, ids, [gate_EFD, up_EFD], down_EDF), weights)

    def _combine(self, y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
        return self.arithmetic.tokenwise(_weighted_sum, y_TKD, weights_TK)[0]

    def _blocked(self, x_TD: Tensor, ids_TK: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor) -> Tensor:
        few_rows = ids_TK.numel() <= BLOCK_MAX_ROWS * self.num_experts
        block = BLOCK_EXPERTS if few_rows and self.num_experts % BLOCK_EXPERTS == 0 else 1
        batch = dispatch(ids_TK, self.num_experts, block=block, multiple=1)
        bias_EF, bias_ED = self.biases or (None, None)
        gate_up_RF = self._block_products(x_TD.index_select(0, batch.token_R), gate_up_EFD, bias_EF, batch.rows_E, block)
        hidden_RF = self.arithmetic.gate(gate_up_RF, self.activation)
        return self._block_products(hidden_RF, down_EDF, bias_ED, batch.rows_E, block)[batch.row_TK]

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

    def _one_by_one(self, x_TD: Tensor, ids_TK: Tensor, first: Sequence[Tensor | Packed], last_EDF: Tensor | Packed) -> Tensor:
        """`first`: stacks whose products lie side by side."""
        multiply = self.arithmetic.packed_linear
        batch = dispatch(ids_TK, self.num_experts, block=1, multiple=TILE_ROWS if self.arithmetic.deterministic else 1)
        x_RD = x_TD.index_select(0, batch.token_R)
        y_RD = torch.empty_like(x_RD)
        rows = zip(torch.split(x_RD, batch.rows_E), torch.split(y_RD, batch.rows_E), strict=True)
        for expert, (x_rows, y_rows) in enumerate(rows):
            if len(x_rows) == 0:
                continue
            first_bias, last_bias = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
            gate_up = multiply(x_rows, [stack[expert] for stack in first], first_bias)
            y_rows.copy_(multiply(self.arithmetic.gate(gate_up, self.activation), [last_EDF[expert]], last_bias))
        return y_RD[batch.row_TK]


def _weighted_sum(y_TKD: Tensor, weights_TK: Tensor) -> tuple[Tensor]:
    """Over a token's experts, in the router's order."""
    return (torch.bmm(weights_TK.to(y_TKD.dtype).unsqueeze(1), y_TKD).squeeze(1),)
