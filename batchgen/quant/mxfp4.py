"""MXFP4, as gpt-oss and Kimi-K3 ship it. In: matrices. Out: 4-bit codes, two to a byte, and a power of two per 32 values, and back.

A code is e2m1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; the value at even places is in a byte's low half. A scale is e8m0: a byte e
for 2^(e - 127), where 255 is NaN (Open Compute Project, Microscaling Formats 1.0). Both layouts hold the same bytes: gpt-oss names them
`_blocks` [..., N, D/32, 16] and `_scales`, compressed-tensors `_packed` [..., N, D/2] and `_scale`.

Encoding, with m the largest magnitude of a block: s = 2^floor(log2 m) / 4, doubled if m >= 1.75 * 2^floor(log2 m), so that m is in
[3.5 s, 7 s); each code is the nearest to w / s, ties to even. e2m1 has 2 significant bits from 1 on, and below that a spacing of 0.5, so

    |error| <= max(|w| / 5, s / 4)         largest: s for |w| = 5 s, that is m / 5

A matrix that was decoded from this format is encoded to the same values again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.quant.format import SLACK, Format, Parts, PartSpec, check_matrix, split

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
MOST_SCALE = 252
"""6 times this, 2^125, is the largest product that float32 holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4(Format):
    """e2m1 with a power of two per 32 values."""

    @property
    def bytes_per_value(self) -> float:
        return 0.5 + 1 / GROUP

    @property
    def row_block(self) -> int:
        return 1

    @property
    def largest_error(self) -> float:
        return 1 / 5

    def _codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    def storage(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        check_matrix(shape, GROUP, "MXFP4")
        codes, scales = self.suffixes
        return {
            codes: PartSpec(shape=self._codes_shape(shape), dtype=torch.uint8, accepts=(torch.uint8,)),
            scales: PartSpec(shape=(*shape[:-1], shape[-1] // GROUP), dtype=torch.uint8, accepts=(torch.uint8, torch.float8_e8m0fnu)),
        }

    def shape(self, parts: Parts) -> tuple[int, ...]:
        *rows, num_groups = parts[self.suffixes[1]].shape
        return (*rows, num_groups * GROUP)

    def bound(self, weight: Tensor) -> Tensor:
        grouped = split(weight.float(), GROUP)
        scale = _power_of_two(_exponents(grouped)).unsqueeze(-1)
        size = grouped.abs()
        return (torch.maximum(size / 5, scale / 4) + size * SLACK).flatten(-2)

    def _encode(self, weight_RD: Tensor, parts: Parts) -> None:
        grouped = split(weight_RD, GROUP)
        exponents = _exponents(grouped)
        scaled = grouped.abs() * _power_of_two(-exponents).unsqueeze(-1)
        # spacings are 0.5 up to 2, 1 up to 4, then 2; where one does not hold, its rounding gives a larger code
        code = (scaled * 2).round_()
        torch.minimum(code, scaled.round().add_(2), out=code)
        torch.minimum(code, scaled.mul_(0.5).round_().add_(4), out=code)
        pairs = split((code.to(torch.uint8) | (torch.signbit(grouped).to(torch.uint8) << 3)).flatten(-2), 2)
        codes, scales = (parts[suffix] for suffix in self.suffixes)
        codes.copy_((pairs[..., 0] | pairs[..., 1] << 4).view(codes.shape))
        scales.copy_(exponents + SCALE_BIAS)

    def _decode(self, parts: Parts) -> Tensor:
        codes, scales = (parts[suffix] for suffix in self.suffixes)
        values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=codes.device)
        packed = codes.reshape(*scales.shape, GROUP // 2)
        grouped = values[torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()]
        return (grouped * _power_of_two(scales.int() - SCALE_BIAS).unsqueeze(-1)).flatten(-2)

    def _broken(self, parts: Parts) -> str | None:
        return "a group's scale is NaN or over 2^125" if parts[self.suffixes[1]].amax() > MOST_SCALE else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Blocks(Mxfp4):
    """As gpt-oss names it."""

    suffixes = ("_blocks", "_scales")

    def _codes_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // GROUP, GROUP // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Packed(Mxfp4):
    """As compressed-tensors names it (`mxfp4-pack-quantized`)."""

    suffixes = ("_packed", "_scale")


def _exponents(grouped: Tensor) -> Tensor:
    """Exponent of each group's scale, int32 without the last dimension."""
    fraction, exponent = torch.frexp(grouped.abs().amax(-1))
    exponent = torch.where(fraction >= 0.875, exponent - 2, exponent - 3)
    return torch.where(fraction == 0, -SCALE_BIAS, exponent).clamp(min=-SCALE_BIAS)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^-127 is no normal number: in two steps."""
    half = exponents // 2
    return torch.ldexp(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), half), exponents - half)
