"""FP8 with block scales, as DeepSeek-V3, GLM-5 and MiniMax-M2 ship it. In: matrices. Out: e4m3 codes and float32 scales, and back.

`weight` holds e4m3 values (1 sign, 4 exponent, 3 mantissa bits; largest 448, no infinity), `weight_scale_inv` the factor of each block of
128 x 128; blocks at the right and lower edge may be cut short. Despite its name the factor multiplies.

Encoding: s = largest magnitude / 448, at least 2^-126, and each code is w / s to the nearest, ties to even. An e4m3 number has 4
significant bits from 2^-6 on, and below that a spacing of 2^-9, so with the block's largest magnitude m

    |error| <= max(|w| / 17, s / 1024)         largest: 16 s for |w| of more than 256 s, that is m / 28
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.quant.format import LEAST_SCALE, SLACK, Format, Parts, PartSpec, check_matrix

LARGEST = 448.0
NAN_CODES = (0xFF, 0x7F)
"""With a sign, and without."""
MOST_SCALE = 2.0**117
"""448 times this is a number of float32, and so is 256 times this, which kernels use."""
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8(Format):
    """e4m3 with a scale per block."""

    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale."""
    powers_of_two: bool = False
    """Scales are rounded up to powers of two when encoding, as `scale_fmt: ue8m0` asks (DeepSeek-V3.1): they are up to
    twice as large, and an error reaches m / 17."""

    suffixes = ("", "_scale_inv")

    @property
    def bytes_per_value(self) -> float:
        return 1 + 4 / (self.block[0] * self.block[1])

    @property
    def row_block(self) -> int:
        return self.block[0]

    @property
    def largest_error(self) -> float:
        return 1 / 17 if self.powers_of_two else 1 / 28

    def storage(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        check_matrix(shape, 1, "FP8")
        scales = (*shape[:-2], -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1]))
        return {
            "": PartSpec(shape=shape, dtype=torch.float8_e4m3fn, accepts=(torch.float8_e4m3fn,)),
            "_scale_inv": PartSpec(shape=scales, dtype=torch.float32, accepts=SCALE_TYPES if self.powers_of_two else SCALE_TYPES[:2]),
        }

    def shape(self, parts: Parts) -> tuple[int, ...]:
        return tuple(parts[""].shape)

    def bound(self, weight: Tensor) -> Tensor:
        scales = torch.stack([self._scales(matrix) for matrix in weight.float().reshape(-1, *weight.shape[-2:])])
        scale = self._spread(scales, *weight.shape[-2:]).view(weight.shape)
        size = weight.float().abs()
        return torch.maximum(size / 17, scale / 1024) + size * SLACK

    def _scales(self, weight_RD: Tensor) -> Tensor:
        height, width = self.block
        num_rows, depth = weight_RD.shape
        padded = F.pad(weight_RD.abs(), (0, -depth % width, 0, -num_rows % height))
        largest = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
        scales = (largest / LARGEST).clamp_(min=LEAST_SCALE)
        if not self.powers_of_two:
            return scales
        fraction, exponent = torch.frexp(scales)
        return torch.ldexp(torch.ones_like(scales), torch.where(fraction == 0.5, exponent - 1, exponent))

    def _spread(self, scales: Tensor, num_rows: int, depth: int) -> Tensor:
        """Each value's own scale."""
        tall = scales.repeat_interleave(self.block[0], -2)[..., :num_rows, :]
        return tall.repeat_interleave(self.block[1], -1)[..., :depth]

    def _encode(self, weight_RD: Tensor, parts: Parts) -> None:
        scales = self._scales(weight_RD)
        parts["_scale_inv"].copy_(scales)
        parts[""].copy_((weight_RD / self._spread(scales, *weight_RD.shape)).clamp_(-LARGEST, LARGEST))

    def _decode(self, parts: Parts) -> Tensor:
        return parts[""].float() * self._spread(parts["_scale_inv"], *parts[""].shape)

    def _broken(self, parts: Parts) -> str | None:
        if not parts["_scale_inv"].abs().amax() <= MOST_SCALE:  # not even if one is NaN
            return "a block's scale is not finite or beyond 2^117"
        # as bytes a NaN is the largest number, unsigned or signed; looking at each takes 30 times as long
        codes = parts[""].view(torch.uint8), parts[""].view(torch.int8)
        return "a value is NaN" if codes[0].amax() == NAN_CODES[0] or codes[1].amax() == NAN_CODES[1] else None
