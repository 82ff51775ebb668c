"""Where a module's parameters live and what checkpoints call them. In: shapes and names. Out: storage, and every name registered once.
Never computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchgen.arithmetic import Arithmetic
from batchgen.errors import ModelError
from batchgen.huge_pages import empty_huge
from batchgen.quant.format import Format
from batchgen.quant.packed import Packed
from batchgen.quant.read import Quantization
from batchgen.weights import Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A module's place in the model: its prefix, and what all modules share."""

    arithmetic: Arithmetic
    hidden_size: int
    rms_norm_eps: float
    quantization: Quantization | None = None
    prefix: str = ""
    slots: list[Slot] = field(default_factory=list)
    """Every parameter of the model under its Hugging Face names, in the order of construction."""
    matrices: list[Tensor | Packed] = field(default_factory=list)
    """Right operands of the model's products, one expert for all."""

    def __truediv__(self, name: str) -> "Scope":
        """The scope of a child module."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Storage of a parameter, kept for the life of the model; in the model's storage type."""
        return empty_huge(shape, dtype or self.arithmetic.storage_dtype, self.arithmetic.device)

    def format_of(self, name: str, *shape: int) -> Format | None:
        """How the checkpoint has a right operand of products with this name and shape; None: plainly. ModelError if it cannot be."""
        if self.quantization is None:
            return None
        form = self.quantization.format_of(self.full(name))
        try:
            if form is not None:
                form.storage(shape)
        except ModelError as error:
            raise ModelError(f"{self.quantization.where} asks for {self.full(name)}: {error}") from error
        return form

    def full(self, name: str) -> str:
        """A name in this scope as checkpoints have it."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def slot(self, name: str, view: Tensor | Packed, **options: Any) -> Slot:
        """A name in this scope; `register` makes it known."""
        return Slot(self.full(name), view, **options)

    def register(self, name: str, view: Tensor | Packed, **options: Any) -> None:
        """Let checkpoints and trainers fill `view` under this name."""
        self.slots.append(self.slot(name, view, **options))

    def also(self, common: str, name: str) -> None:
        """Let trainers send what is registered as `name` under the name that a loaded model of transformers has for it, too."""
        full = self.full(name)
        own = next(slot for slot in reversed(self.slots) if slot.name == full)
        self.register(common, own.view, shape=own.shape, covers=[own])

    def parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """New storage under a name of its own."""
        view = self.tensor(*shape, dtype=dtype)
        self.register(name, view, **options)
        return view


class Linear:
    """A product with one or several matrices of a checkpoint, stacked by output; packed in memory if they are in the checkpoint."""

    def __init__(
        self,
        scope: Scope,
        num_inputs: int,
        outputs: dict[str, int],
        bias: bool = False,
        unpacked: bool = False,
        tied: tuple[str, Tensor] | None = None,
    ):
        """`outputs`: names of the matrices, and their sizes. `unpacked`: quantised matrices are decoded when they are loaded. `tied`: name
        and storage of the parameter that the one matrix is."""
        arithmetic = scope.arithmetic
        self.sizes = list(outputs.values())
        self._product: Callable[[Tensor, Any, Tensor | None], Tensor] = arithmetic.linear
        self._weight: Tensor | list[Tensor | Packed]
        views: list[Tensor | Packed]
        names = [f"{name}.weight" for name in outputs]
        forms = [None if tied else scope.format_of(name, size, num_inputs) for name, size in zip(names, self.sizes, strict=True)]
        if any(forms) and not unpacked:
            self._product = arithmetic.packed_linear
            self._weight = views = [
                scope.tensor(size, num_inputs) if form is None else Packed(form, form.allocate((size, num_inputs), arithmetic.device))
                for form, size in zip(forms, self.sizes, strict=True)
            ]
            forms = [None] * len(forms)
        else:
            self._weight = weight_ND = scope.tensor(sum(self.sizes), num_inputs) if tied is None else tied[1]
            views = list(torch.split(weight_ND, self.sizes))
        self.bias_N = scope.tensor(sum(self.sizes)) if bias else None
        scope.matrices.extend(self._weight if isinstance(self._weight, list) else [self._weight])
        for name, view, form in zip(names, views, forms, strict=True):
            scope.register(name, view, decoded=form, alias_of=tied[0] if tied else None)
        if self.bias_N is not None:
            for name, part in zip(outputs, torch.split(self.bias_N, self.sizes), strict=True):
                scope.register(f"{name}.bias", part)

    @property
    def weight_ND(self) -> Tensor:
        """Of a plain or `unpacked` one."""
        assert isinstance(self._weight, Tensor)
        return self._weight

    def __call__(self, x_TD: Tensor) -> Tensor:
        """All outputs side by side."""
        return self._product(x_TD, self._weight, self.bias_N)


class RmsNorm:
    """Root-mean-square norm with gains."""

    def __init__(self, scope: Scope, name: str, size: int, eps: float | None = None, offset: float = 0.0):
        self.arithmetic, self.eps = scope.arithmetic, scope.rms_norm_eps if eps is None else eps
        dtype = torch.float32 if offset else None
        self.gains_D = scope.parameter(f"{name}.weight", size, dtype=dtype, offset=offset)

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension, [T, D] or [T, H, D] with heads side by side."""
        return self.arithmetic.rms_norm(x, self.gains_D, self.eps)

    def add(self, x_TD: Tensor, delta_TD: Any) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        return self.arithmetic.add_norm(x_TD, delta_TD, self.gains_D, self.eps)
