"""The CPU's products with packed weights. In: float32 activations, packed matrices. Out: float32. Never holds more than a panel decoded.

Shapes: T tokens, D inputs or model, N outputs, K experts per token, E experts, F expert width, R rows of the expert batch.
"""

import torch
from torch import Tensor

from batchgen.moe.activation import Activation
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import GROUP, Mxfp4
from batchgen.quant.packed import Packed

ACTIVATIONS = ("silu", "clamped", "situ", "limited")
"""As cpu.c numbers them."""
PLAIN, FP8, MXFP4, INT4 = ({torch.float32: 0, torch.bfloat16: 1}, 2, 3, 4)
"""Kinds of matrices as cpu.h numbers them."""
PANEL_BYTES = 1 << 17
"""Decoded weights that stay in a second-level cache."""
TILE_OUTPUTS, TASK_OUTPUTS = 3, 96
"""Outputs that are computed together, as in cpu.h."""


class PackedProducts:
    """Part of CpuKernels."""

    def _call(self, name: str, *arguments: Tensor | float | None) -> None:
        raise NotImplementedError

    @staticmethod
    def _coded(activation: Activation) -> tuple[int, float, float]:
        """As cpu.c takes it."""
        return ACTIVATIONS.index(activation.kind), activation.a, activation.b

    def packed_linear(self, x_TD: Tensor, weight_ND: Tensor | Packed, out_TN: Tensor | None = None) -> Tensor:
        """x @ weight.T, float32 [T, N], bit for bit as `linear` with the decoded weight. `out_TN`: where to put it, columns of a wider
        tensor if need be."""
        x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
        (num_tokens, depth), num_outputs = x_TD.shape, weight_ND.shape[0]
        y_TN = x_TD.new_empty(num_tokens, num_outputs) if out_TN is None else out_TN
        panel, scratch = panel_rows(depth), torch.empty(torch.get_num_threads(), panel_rows(depth) * depth)
        sizes = (num_tokens, num_outputs, depth, panel)
        self._call("packed_linear", x_TD, x_TD.stride(0), describe(weight_ND), y_TN, y_TN.stride(0), *sizes, scratch)
        return y_TN

    def packed_experts(
        self,
        x_TD: Tensor,
        gate_EFD: Packed,
        up_EFD: Packed,
        down_EDF: Packed,
        ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As `experts`, bit for bit as with the decoded weights; gate and up are stacks of their own, because the blocks of some formats do
        not end where the gate's rows do. `biases` are plain tensors, gate above up."""
        matrices = (describe(gate_EFD), describe(up_EFD), describe(down_EDF))
        return self._experts(x_TD, matrices, down_EDF.shape, ids_TK, weights_TK, activation, biases)

    def _experts(
        self,
        x_TD: Tensor,
        matrices: tuple[Tensor, Tensor, Tensor],
        shape_EDF: torch.Size,
        ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation,
        biases: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        (num_tokens, k), (num_experts, depth, width) = ids_TK.shape, shape_EDF
        x_TD, ids_TK, weights_TK = x_TD.contiguous(), ids_TK.contiguous(), weights_TK.float().contiguous()
        out_TD = torch.empty_like(x_TD)
        order_R, start_E = ids_TK.new_empty(num_tokens * k), ids_TK.new_empty(num_experts + 1)
        hidden_RF, y_RD = x_TD.new_empty(num_tokens * k, width), x_TD.new_empty(num_tokens * k, depth)
        sizes = (num_tokens, k, num_experts, depth, width)
        bias = (*(biases or (None, None)), int(biases is not None and biases[0].dtype == torch.bfloat16))
        panels = (panel_rows(depth), panel_rows(width))
        scratch = torch.empty(torch.get_num_threads(), max(panels[0] * depth, panels[1] * width))
        work = (order_R, start_E, hidden_RF, y_RD, *panels, scratch.shape[1], scratch)
        self._call("experts", x_TD, *matrices, *bias, *self._coded(activation), ids_TK, weights_TK, out_TD, *sizes, *work)
        return out_TD


def panel_rows(depth: int) -> int:
    """Rows that are decoded at a time."""
    rows = PANEL_BYTES // 4 // depth // TILE_OUTPUTS * TILE_OUTPUTS
    return max(TILE_OUTPUTS, min(TASK_OUTPUTS, rows))


def describe(weight: Tensor | Packed, first_row: int = 0) -> Tensor:
    """What C calls a `matrix`: of a whole stack, or a part of each of its matrices that begins at a row (of plain weights)."""
    stride = weight.shape[-2]
    if isinstance(weight, Tensor):
        return torch.tensor(
            [weight.data_ptr() + first_row * weight.stride(-2) * weight.element_size(), 0, PLAIN[weight.dtype], 0, 0, stride]
        )
    form = weight.form
    if isinstance(form, Fp8):
        kind, (height, width) = FP8, form.block
    elif isinstance(form, Mxfp4):
        kind, height, width = MXFP4, 1, GROUP
    else:
        assert isinstance(form, Int4)
        kind, height, width = INT4, 1, form.group
    return torch.tensor([weight.codes.data_ptr(), weight.scales.data_ptr(), kind, height, width, stride])
