"""A matrix that stays packed in memory. In: a format and its parts. Out: what kernels need to find them. Never decodes unasked."""

import torch
from torch import Tensor

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

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values."""
        return self.form.decode(self.parts, dtype)
