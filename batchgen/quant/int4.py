"""INT4 in groups, as compressed-tensors packs it (Kimi-K2-Thinking). In: matrices. Out: packed integers and scales, and back.

A word of int32 holds eight 4-bit codes, the first in its lowest bits. A value is (code - 8) * scale; scales are bfloat16, one per group.

Encoding, with m the largest magnitude of a group: of the scales m / 7, m / 7.5 and m / 8, rounded to bfloat16 and at least 2^-126, the one
whose largest error in the group is least; each integer is w / s to the nearest, within -8..7. m / 7.5 alone guarantees

    |error| <= m (1/15 + 2^-8)

(half a step, or what is cut off at +m if the scale was rounded down). The other two make an encoder's own values, whose largest integer is
7 or -8, come back as they were: exactly from float32; from bfloat16, in which a trainer may keep them, with the same integers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.quant.format import LEAST_SCALE, SLACK, Format, Parts, PartSpec, check_matrix, split

PER_WORD = 8
ZERO = 8
MOST_SCALE = 2.0**125
"""8 times less than this is a number of float32."""
STEPS = (7.0, 7.5, 8.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4(Format):
    """Signed 4-bit integers with a scale per group of inputs."""

    group: int = 32

    suffixes = ("_packed", "_scale", "_shape")

    @property
    def bytes_per_value(self) -> float:
        return 0.5 + 2 / self.group

    @property
    def row_block(self) -> int:
        return 1

    @property
    def largest_error(self) -> float:
        return 1 / 15 + 2**-8

    def storage(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        check_matrix(shape, self.group, "INT4")
        *stack, num_rows, depth = shape
        integers = (torch.int64, torch.int32)
        return {
            "_packed": PartSpec(shape=(*stack, num_rows, depth // PER_WORD), dtype=torch.int32, accepts=(torch.int32,)),
            "_scale": PartSpec(shape=(*stack, num_rows, depth // self.group), dtype=torch.bfloat16, accepts=(torch.bfloat16,)),
            "_shape": PartSpec(shape=(*stack, 2), dtype=torch.int64, accepts=integers),
        }

    def shape(self, parts: Parts) -> tuple[int, ...]:
        *rows, num_words = parts["_packed"].shape
        return (*rows, num_words * PER_WORD)

    def bound(self, weight: Tensor) -> Tensor:
        grouped = split(weight.float(), self.group)
        size = grouped.abs()
        most = (size.amax(-1, keepdim=True) * self.largest_error).clamp(min=LEAST_SCALE / 2)
        return (most.expand(size.shape) + size * SLACK).flatten(-2)

    def _constant(self, shape: tuple[int, ...]) -> Tensor:
        return torch.tensor(shape[-2:])

    def _encode(self, weight_RD: Tensor, parts: Parts) -> None:
        grouped = split(weight_RD, self.group)
        largest = grouped.abs().amax(-1, keepdim=True)
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for steps in STEPS:
            scale = (largest / steps).clamp_(min=LEAST_SCALE).bfloat16().float()
            code = (grouped / scale).round_().clamp_(-ZERO, ZERO - 1)
            error = (code * scale - grouped).abs_().amax(-1, keepdim=True)
            if best is not None:
                better = error < best[0]
                error, scale, code = (torch.where(better, new, old) for new, old in zip((error, scale, code), best, strict=True))
            best = error, scale, code
        nibbles = split(code.flatten(-2).int() + ZERO, PER_WORD)
        words = nibbles[..., 0]
        for place in range(1, PER_WORD):
            words = words | nibbles[..., place] << 4 * place
        parts["_packed"].copy_(words)
        parts["_scale"].copy_(scale.squeeze(-1))

    def _decode(self, parts: Parts) -> Tensor:
        shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=parts["_packed"].device)
        values = ((parts["_packed"].unsqueeze(-1) >> shifts & 15) - ZERO).flatten(-2).float()
        return (split(values, self.group) * parts["_scale"].float().unsqueeze(-1)).flatten(-2)

    def _broken(self, parts: Parts) -> str | None:
        if not parts["_scale"].abs().amax() < MOST_SCALE:  # not even if one is NaN
            return "a group's scale is not finite or not below 2^125"
        shape = self.shape(parts)[-2:]
        if (parts["_shape"] != torch.tensor(shape, device=parts["_shape"].device)).any():
            return f"weight_shape says {parts['_shape'].view(-1, 2)[0].tolist()}, the packed tensor is {list(shape)}"
        return None
