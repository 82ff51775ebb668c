"""What all quantised formats share. In: a matrix or its packed parts. Out: the other of the two. Never knows a model or a file.

A logical matrix W [N, D] (outputs, inputs) or a stack of them [..., N, D] lies in several tensors, its parts, named by what checkpoints
append to the matrix's own name. Parts stay in memory as they are in the file; the first one holds the codes, the second their scales.

Shapes: N outputs, D inputs, R rows of a chunk.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from batchgen.errors import ModelError, WeightUpdateError
from batchgen.huge_pages import empty_huge

CHUNK_VALUES = 1 << 18
"""Values that are widened at a time on a CPU: a few temporaries of 1 MB, which stay in cache, whatever the matrix's size."""
GPU_CHUNK_VALUES = 1 << 22
"""On a GPU, where each operation has a start of its own."""
LARGEST = 2.0**126
"""Magnitude that is encoded: no product of code and scale overflows."""
LEAST_SCALE = 2.0**-126
"""Smallest scale that is chosen: float32's smallest normal number, so that no scale is rounded among subnormals."""
SLACK = 2.0**-20
"""Share of a value that the float32 operations of encoding and decoding may add to a bound."""

Parts = dict[str, Tensor]
"""The tensors of one matrix or stack by suffix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSpec:
    """Shape and type of one part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """In memory."""
    accepts: tuple[torch.dtype, ...]
    """In files; each converts to `dtype` without loss."""

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """ModelError unless a file's tensor, known by its header alone, fits. `name` may begin with the file's."""
        if shape != self.shape:
            raise ModelError(f"{name} has shape {list(shape)}, the model's is {list(self.shape)}")
        if dtype not in self.accepts:
            raise ModelError(f"{name} has dtype {_short(dtype)}; read in this format: {', '.join(map(_short, self.accepts))}")

    def convert(self, tensor: Tensor) -> Tensor:
        """A file's tensor in the type that is kept."""
        if tensor.dtype == torch.uint8 and self.dtype == torch.float32:
            tensor = tensor.view(torch.float8_e8m0fnu)
        elif tensor.dtype == torch.float8_e8m0fnu and self.dtype == torch.uint8:
            tensor = tensor.view(torch.uint8)
        return tensor.to(self.dtype)


class Format(ABC):
    """How a matrix lies in its parts."""

    suffixes: ClassVar[tuple[str, ...]]
    """Of codes and scales, then of whatever else belongs to it."""

    @property
    @abstractmethod
    def bytes_per_value(self) -> float:
        """Of codes and scales together, in a large matrix."""

    @property
    @abstractmethod
    def row_block(self) -> int:
        """Rows that share a scale: rows are cut at multiples of it."""

    @property
    @abstractmethod
    def largest_error(self) -> float:
        """Bound of an encoded value's error as a share of the largest magnitude in its block."""

    @abstractmethod
    def storage(self, shape: tuple[int, ...]) -> dict[str, PartSpec]:
        """The parts of a matrix [N, D] or a stack [..., N, D]. ModelError for a shape that the format cannot hold."""

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The logical shape behind the parts."""

    @abstractmethod
    def bound(self, weight: Tensor) -> Tensor:
        """Value by value, what |decode(encode(weight)) - weight| cannot exceed; float32, of the weight's shape."""

    @abstractmethod
    def _encode(self, weight_RD: Tensor, parts: Parts) -> None: ...
    @abstractmethod
    def _decode(self, parts: Parts) -> Tensor: ...
    @abstractmethod
    def _broken(self, parts: Parts) -> str | None:
        """Why no encoder can have written this."""

    def names(self, name: str) -> dict[str, str]:
        """The parts' names in checkpoints, of a matrix that would be called `name` if it were not quantised."""
        return {suffix: name + suffix for suffix in self.suffixes}

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Memory of all parts."""
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.storage(shape).values())

    def allocate(self, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Parts:
        """Storage that is not filled yet."""
        return {suffix: empty_huge(spec.shape, spec.dtype, device) for suffix, spec in self.storage(shape).items()}

    def select(self, parts: Parts, index: int) -> Parts:
        """One matrix of a stack, where it lies."""
        return {suffix: part[index] for suffix, part in parts.items()}

    def rows(self, parts: Parts, first: int, end: int) -> Parts:
        """Rows `first` to `end` of one matrix, where they lie; `first` is a multiple of `row_block`."""
        if first % self.row_block:
            raise ValueError(f"rows are cut at multiples of {self.row_block}, got {first}")
        codes, scales = self.suffixes[:2]
        blocks = slice(first // self.row_block, -(-end // self.row_block))
        return {codes: parts[codes][first:end], scales: parts[scales][blocks]}

    def chunk_rows(self, depth: int, device: torch.device) -> int:
        """Rows that are widened at a time: whole blocks, and at least one."""
        values = CHUNK_VALUES if device.type == "cpu" else GPU_CHUNK_VALUES
        return max(1, values // depth // self.row_block) * self.row_block

    def check(self, parts: Parts, name: str) -> None:
        """ModelError for values that no matrix has: NaN codes, scales that are not finite, a stated shape that is not the tensors'."""
        reason = self._broken(parts)
        if reason is not None:
            raise ModelError(f"{name}: {reason}; the checkpoint is damaged, copy it again")

    def decode(self, parts: Parts, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix or stack; each value is code times scale, rounded once to float32 and then to `dtype`."""
        shape = self.shape(parts)
        weight = torch.empty(shape, dtype=dtype, device=parts[self.suffixes[0]].device)
        for matrix, target in self._matrices(parts, weight):
            for first, end in self._chunks(shape, weight.device):
                target[first:end] = self._decode(self.rows(matrix, first, end))
        return weight

    def encode(self, weight: Tensor, into: Parts | None = None, name: str = "the tensor") -> Parts:
        """A matrix or stack of any floating type in this format; `into`: existing storage, which is filled in place. WeightUpdateError
        for values that are not finite or beyond `LARGEST`; what was in `into` may be overwritten then."""
        parts = self.allocate(tuple(weight.shape), weight.device) if into is None else into
        for suffix in self.suffixes[2:]:
            parts[suffix].copy_(self._constant(tuple(weight.shape)))
        for matrix, source in self._matrices(parts, weight.detach()):
            for first, end in self._chunks(tuple(weight.shape), weight.device):
                rows_RD = source[first:end].float().contiguous()
                if not rows_RD.abs().amax() <= LARGEST:  # not even if one is NaN
                    raise WeightUpdateError(f"{name} has values that are not finite or beyond 2^126; the trainer's weights are broken")
                self._encode(rows_RD, self.rows(matrix, first, end))
        return parts

    def _constant(self, shape: tuple[int, ...]) -> Tensor:
        raise NotImplementedError

    def _matrices(self, parts: Parts, weight: Tensor) -> Iterator[tuple[Parts, Tensor]]:
        if weight.dim() == 2:
            yield parts, weight
            return
        for index in range(len(weight)):
            yield from self._matrices(self.select(parts, index), weight[index])

    def _chunks(self, shape: tuple[int, ...], device: torch.device) -> Iterator[tuple[int, int]]:
        num_rows, depth = shape[-2:]
        step = self.chunk_rows(depth, device)
        return ((first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def check_matrix(shape: tuple[int, ...], multiple: int, what: str) -> None:
    """ModelError unless `shape` is a matrix or a stack of them, with rows of whole blocks."""
    if len(shape) < 2 or 0 in shape:
        raise ModelError(f"{what} holds matrices, got a tensor of shape {list(shape)}")
    if shape[-1] % multiple:
        raise ModelError(f"{what} holds rows of a multiple of {multiple} values, got {shape[-1]} in shape {list(shape)}")


def split(tensor: Tensor, size: int) -> Tensor:
    """The last dimension in runs of `size`."""
    return tensor.reshape(*tensor.shape[:-1], -1, size)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
