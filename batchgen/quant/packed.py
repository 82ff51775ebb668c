"""A matrix that stays packed in memory. In: a format and its parts. Out: what kernels need to find them. Never decodes unasked."""

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.quant.format import Format, Parts


class Packed:
    """Weights [N, D], or a stack [E, N, D], as their checkpoint ships them; stands where a Tensor of float weights would."""

    def __init__(self, form: Format, parts: Parts):
        self.form, self.parts = form, parts
        self.shape = torch.Size(form.shape(parts))
        self.codes, self.scales = (parts[suffix] for suffix in form.suffixes[:2])

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def __getitem__(self, index: int) -> "Packed":
        """One matrix of a stack, where it lies."""
        return Packed(self.form, self.form.select(self.parts, index))

    def rows(self, first: int, end: int) -> "Packed":
        """Rows of a matrix, where they lie; `first` is a multiple of the format's `row_block`."""
        return Packed(self.form, self.form.rows(self.parts, first, end))

    def swapped(self) -> "Packed":
        """A stack of stacks with the two numbers of each matrix in the other order, where it lies."""
        return Packed(self.form, {suffix: part.transpose(0, 1) for suffix, part in self.parts.items()})

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values."""
        return self.form.decode(self.parts, dtype)


def linear(x_TD: Tensor, weight_ND: Packed) -> Tensor:
    """x @ weight.T in plain torch, in the type of x; `chunk_rows` of weights are decoded at a time."""
    num_outputs, depth = weight_ND.shape
    step = weight_ND.form.chunk_rows(depth, x_TD.device)
    y_TN = x_TD.new_empty(len(x_TD), num_outputs)
    for first in range(0, num_outputs, step):
        end = min(first + step, num_outputs)
        y_TN[:, first:end] = F.linear(x_TD, weight_ND.rows(first, end).decode(x_TD.dtype))
    return y_TN
