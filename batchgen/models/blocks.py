"""Pieces that decoder families share. In: activations of a packed batch. Out: activations. Never reads a checkpoint or a scheduler.

Shapes: T tokens, D model, F feed-forward width.
"""

from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.huge_pages import empty_huge


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2F] projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class DenseMLP:
    """Feed-forward layer with fused gate and up projections."""

    def __init__(self, hidden_size: int, width: int, arithmetic: Arithmetic, bias: bool = False):
        self.arithmetic = arithmetic
        self.gate_up_FD = empty_weight(arithmetic, 2 * width, hidden_size)
        self.down_DF = empty_weight(arithmetic, hidden_size, width)
        self.gate_up_bias_F = empty_weight(arithmetic, 2 * width) if bias else None
        self.down_bias_D = empty_weight(arithmetic, hidden_size) if bias else None

    def __call__(self, x_TD: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        return linear(gated_silu(linear(x_TD, self.gate_up_FD, self.gate_up_bias_F)), self.down_DF, self.down_bias_D)


def empty_weight(arithmetic: Arithmetic, *shape: int) -> Tensor:
    """Storage of a parameter, kept for the life of the model."""
    return empty_huge(shape, arithmetic.storage_dtype, arithmetic.device)
