"""Pieces that decoder families share. In: activations of a packed batch. Out: activations. Never reads a checkpoint or a scheduler.

Shapes: T tokens, D model, H heads, d head size, F feed-forward width, N outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.huge_pages import empty_huge


def rotary_table(max_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """float32 [max_positions, 2, head_dim]: cosines, and sines whose first half is negated, of each position's angles."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    angles = torch.outer(torch.arange(max_positions).float(), inverse)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1).to(device)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [..., 2F] projection."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class DenseMLP:
    """Feed-forward layer with fused gate and up projections."""

    def __init__(self, hidden_size: int, width: int, arithmetic: Arithmetic):
        self.arithmetic = arithmetic
        self.gate_up_FD = empty_weight(arithmetic, 2 * width, hidden_size)
        self.down_DF = empty_weight(arithmetic, hidden_size, width)

    def __call__(self, x_TD: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        return linear(gated_silu(linear(x_TD, self.gate_up_FD)), self.down_DF)


def empty_weight(arithmetic: Arithmetic, *shape: int) -> Tensor:
    """Storage of a parameter, kept for the life of the model."""
    return empty_huge(shape, arithmetic.storage_dtype, arithmetic.device)
