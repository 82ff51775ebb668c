"""How products are computed on this device. In: storage dtype, device, whether results must be batch-invariant. Out: linear products.
Never knows a model.

On a CPU everything is computed in float32, from weights in either type: by compiled kernels (`batchgen.kernels.cpu`), or, where those
are missing, by torch's products, for which a block of bfloat16 weights is widened into a small scratch that stays in cache. The
CPU's kernels are batch-invariant. Otherwise batch-invariant mode computes in tiles of a fixed shape, so that the same kernel runs, in
the same order, whatever else is in the batch. On a GPU bfloat16 goes through `batchgen.kernels.gpu`.

Shapes: T tokens, D inputs, N outputs, H heads, d head size, R rotated dimensions, F feed-forward width.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.errors import ModelError
from batchgen.kernels import cpu
from batchgen.moe import activation as plain
from batchgen.moe.activation import Activation
from batchgen.moe.expert_sum import ExpertSum
from batchgen.moe.routing import Routing
from batchgen.packing import Spans
from batchgen.quant import packed
from batchgen.quant.packed import Packed

log = logging.getLogger(__name__)

TILE_ROWS = 16
"""Tokens of one tile in batch-invariant mode."""
SCRATCH_ELEMENTS = 1 << 19
"""Weights widened at a time: 2 MB of float32, the size of a second-level cache."""


class Kernels(Protocol):
    """What fast kernels of a device offer; see `CpuKernels`."""

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor: ...
    def rms_norm(self, x_THD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def add_norm(self, x_TD: Tensor, delta_TD: Any, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def place_heads(
        self,
        qkv_TX: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary_T2D: Tensor,
        head_slots_N: Tensor,
        k_ND: Tensor,
        v_ND: Tensor,
    ) -> Tensor: ...
    def convolve(self, x_TC: Tensor, taps_CW: Tensor, states: Tensor, spans: Spans) -> Tensor: ...
    def delta_rule(
        self, q_THD: Tensor, k_THD: Tensor, v_TNV: Tensor, log_decay: Tensor, beta_TN: Tensor, states: Tensor, spans: Spans
    ) -> Tensor: ...
    def takes_routing(self, routing: Routing) -> bool: ...
    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    def experts(
        self,
        x_TD: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | ExpertSum: ...


def _choose_kernels(device: torch.device, storage_dtype: torch.dtype, deterministic: bool) -> Kernels | None:
    """The compiled ones of a CPU; those of a GPU for bfloat16, unless results must be batch-invariant, which its libraries' are not."""
    if device.type == "cpu":
        return cpu.load()
    if device.type != "cuda" or storage_dtype != torch.bfloat16 or deterministic:
        return None
    from batchgen.kernels.gpu import GpuKernels

    return GpuKernels()


class Arithmetic:
    """Storage and compute types, and the products that go with them.

    `kernels`: the device's fast ones, if there are any. `tiled`: batch-invariance must come from tiles of a fixed shape.
    """

    def __init__(self, *, storage_dtype: torch.dtype, device: torch.device, deterministic: bool):
        self.device = device
        self.storage_dtype = storage_dtype
        self.compute_dtype = torch.float32 if device.type == "cpu" else storage_dtype
        self.deterministic = deterministic
        self.kernels = _choose_kernels(device, storage_dtype, deterministic)
        self.cpu_kernels = self.kernels if isinstance(self.kernels, cpu.CpuKernels) else None
        self.tiled = deterministic and self.kernels is None
        widen = self.compute_dtype != storage_dtype and self.kernels is None
        self._scratch = torch.empty(SCRATCH_ELEMENTS if widen else 0, dtype=self.compute_dtype, device=device)
        mode = ", batch-invariant" if deterministic else ""
        kernels = type(self.kernels).__name__ if self.kernels else "plain torch"
        log.info("%s: weights %s, arithmetic %s by %s%s", device, storage_dtype, self.compute_dtype, kernels, mode)

    def widen(self, weight: Tensor) -> Tensor:
        """The weight in the compute type; valid until the next call."""
        if weight.dtype == self.compute_dtype:
            return weight
        if weight.numel() > self._scratch.numel():
            self._scratch = self._scratch.new_empty(weight.numel())
        return self._scratch[: weight.numel()].view(weight.shape).copy_(weight)

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None, wide: bool = False) -> Tensor:
        """x @ weight.T + bias in the compute type; `wide`: in float32 whatever that is."""
        if wide and self.compute_dtype != torch.float32:
            return F.linear(x_TD.float(), weight_ND.float(), None if bias_N is None else bias_N.float())
        if self.kernels is not None:
            y_TN = self.kernels.linear(x_TD, weight_ND)
        else:
            (y_TN,) = self.tokenwise(self._product, x_TD, weight_ND=weight_ND)
        return y_TN if bias_N is None else y_TN.add_(bias_N.to(y_TN.dtype))

    def packed_linear(self, x_TD: Tensor, weights: Sequence[Tensor | Packed], bias_N: Tensor | None = None) -> Tensor:
        """As `linear`, with matrices stacked by output, some or all of which stay packed."""
        sizes = [weight.shape[0] for weight in weights]
        y_TN = x_TD.new_empty(len(x_TD), sum(sizes))
        for weight_ND, part_TN in zip(weights, torch.split(y_TN, sizes, dim=1), strict=True):
            if self.cpu_kernels is not None:
                self.cpu_kernels.packed_linear(x_TD, weight_ND, out_TN=part_TN)
            elif isinstance(weight_ND, Packed):
                part_TN.copy_(self.tokenwise(_packed_product, x_TD, weight_ND=weight_ND)[0])
            else:
                part_TN.copy_(self.linear(x_TD, weight_ND))
        return y_TN if bias_N is None else y_TN.add_(bias_N.to(y_TN.dtype))

    def _product(self, x_TD: Tensor, weight_ND: Tensor) -> tuple[Tensor]:
        rows = max(1, SCRATCH_ELEMENTS // weight_ND.shape[1])
        if weight_ND.dtype == self.compute_dtype or weight_ND.shape[0] <= rows:
            return (F.linear(x_TD, self.widen(weight_ND)),)
        return (torch.cat([F.linear(x_TD, self.widen(block)) for block in torch.split(weight_ND, rows)], dim=-1),)

    def head_products(self, x_THD: Tensor, weight_HND: Tensor, transposed: bool = False) -> Tensor:
        """Each head's own product with its matrix, [T, H, N]; `transposed`: with a weight [H, D, N]."""
        if self.cpu_kernels is not None:
            return self.cpu_kernels.head_products(x_THD, weight_HND, transposed)
        weight_HDN = weight_HND if transposed else weight_HND.mT
        return self.tokenwise(self._head_products, x_THD, weight_HDN=self.widen(weight_HDN))[0]

    @staticmethod
    def _head_products(x_THD: Tensor, weight_HDN: Tensor) -> tuple[Tensor]:
        return (torch.bmm(x_THD.transpose(0, 1), weight_HDN).transpose(0, 1),)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
        if self.kernels is not None:
            return self.kernels.rms_norm(x, weight, eps)
        return self.tokenwise(_rms_norm, x, weight=weight, eps=eps)[0]

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | ExpertSum, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm. An ExpertSum goes back to the kernels that made it."""
        if self.kernels is not None:
            return self.kernels.add_norm(x_TD, delta_TD, weight_D, eps)
        assert isinstance(delta_TD, Tensor)
        x_TD = x_TD + delta_TD
        return x_TD, self.rms_norm(x_TD, weight_D, eps)

    def rotate(self, x_THd: Tensor, rotary_T2R: Tensor, interleaved: bool = False) -> Tensor:
        """Rotate pairs (i, i + R/2) of the first R dimensions of each head by its token's angle (Su et al. 2021). `interleaved`: pairs
        (2i, 2i + 1), which are left R/2 apart: the same for queries and keys leaves their products what they are."""
        width = rotary_T2R.shape[-1]
        if interleaved:
            pairs = x_THd[..., :width].reshape(*x_THd.shape[:-1], -1, 2)
            x_THd = torch.cat((pairs[..., 0], pairs[..., 1], x_THd[..., width:]), dim=-1)
        if width < x_THd.shape[-1] or not x_THd.is_contiguous():
            rotated_THR = self.rotate(x_THd[..., :width].contiguous(), rotary_T2R)
            return torch.cat((rotated_THR, x_THd[..., width:]), dim=-1)
        if self.cpu_kernels is not None:
            return self.cpu_kernels.rotate(x_THd, rotary_T2R)
        cos, sin = rotary_T2R.to(x_THd.dtype).unsqueeze(2).unbind(1)
        return x_THd * cos + x_THd.roll(width // 2, -1) * sin

    def gate(self, gate_up_TF: Tensor, activation: Activation) -> Tensor:
        """Activation of rows that hold all gates, then all ups."""
        if self.cpu_kernels is not None:
            return self.cpu_kernels.gate(gate_up_TF, activation)
        return self.tokenwise(_gate, gate_up_TF, activation=activation)[0]

    def sigmoid_times(self, x: Tensor, y: Tensor | None = None, silu: bool = False) -> Tensor:
        """y * sigmoid(x), or y * silu(x); without y, the function itself. Of equal shapes."""
        if self.cpu_kernels is not None:
            return self.cpu_kernels.sigmoid_times(x, y, silu)
        (weights,) = self.tokenwise(_sigmoid, x, silu=silu)
        return weights if y is None else weights * y

    def check_invariance(self, weights: Iterable[Tensor | Packed]) -> None:
        """ModelError unless a row of a tile has the same product wherever in the tile it stands, for every shape among `weights`; a
        property of the matrix library and the processor that no specification promises."""
        for weight_ND in {(weight.shape, type(weight)): weight for weight in weights}.values():
            generator = torch.Generator().manual_seed(0)
            x_D = torch.randn(weight_ND.shape[1], generator=generator).to(self.device, self.compute_dtype)
            x_TD = x_D.expand(TILE_ROWS, -1).contiguous()
            y_TN = self.linear(x_TD, weight_ND) if isinstance(weight_ND, Tensor) else self.packed_linear(x_TD, [weight_ND])
            if not torch.equal(y_TN, y_TN[:1].expand_as(y_TN)):
                raise ModelError(
                    f"products with a {list(weight_ND.shape)} matrix depend on the row on this device; load without deterministic=True"
                )

    def pad_rows(self, num_rows: int) -> int:
        """Rows to allocate for `num_rows`: whole tiles where there are any."""
        return -(-num_rows // TILE_ROWS) * TILE_ROWS if self.tiled else num_rows

    def tokenwise(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, **common: Any) -> tuple[Tensor, ...]:
        """`function` of tensors whose first dimension is tokens (padded by `pad_rows`), tile by tile where `tiled`."""
        if not self.tiled or len(inputs[0]) <= TILE_ROWS:
            return function(*inputs, **common)
        tiles = [function(*tile, **common) for tile in zip(*(torch.split(value, TILE_ROWS) for value in inputs), strict=True)]
        return tuple(torch.cat(outputs) for outputs in zip(*tiles, strict=True))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor]:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((weight * wide if weight.dtype == torch.float32 else weight.to(x.dtype) * wide.to(x.dtype)).to(x.dtype),)


def _packed_product(x_TD: Tensor, weight_ND: Packed) -> tuple[Tensor]:
    return (packed.linear(x_TD, weight_ND),)


def _gate(gate_up_TF: Tensor, activation: Activation) -> tuple[Tensor]:
    return (plain.gate(gate_up_TF, activation),)


def _sigmoid(x: Tensor, silu: bool) -> tuple[Tensor]:
    return (F.silu(x) if silu else x.sigmoid(),)
