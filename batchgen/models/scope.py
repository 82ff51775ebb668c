"""Where a module's parameters live and what checkpoints call them. In: shapes and names. Out: storage, and every name registered once.
Never computes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchgen.arithmetic import Arithmetic
from batchgen.huge_pages import empty_huge
from batchgen.weights import Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """A module's place in the model: its prefix, and what all modules share."""

    arithmetic: Arithmetic
    hidden_size: int
    rms_norm_eps: float
    prefix: str = ""
    slots: list[Slot] = field(default_factory=list)
    """Every parameter of the model under its Hugging Face names, in the order of construction."""
    matrices: list[Tensor] = field(default_factory=list)
    """Right operands of the model's products, one expert for all."""

    def __truediv__(self, name: str) -> "Scope":
        """The scope of a child module."""
        return replace(self, prefix=f"{self.prefix}.{name}" if self.prefix else name)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Storage of a parameter, kept for the life of the model; in the model's storage type."""
        return empty_huge(shape, dtype or self.arithmetic.storage_dtype, self.arithmetic.device)

    def slot(self, name: str, view: Tensor, **options: Any) -> Slot:
        """A name in this scope; `register` makes it known."""
        return Slot(f"{self.prefix}.{name}" if self.prefix else name, view, **options)

    def register(self, name: str, view: Tensor, **options: Any) -> None:
        """Let checkpoints and trainers fill `view` under this name."""
        self.slots.append(self.slot(name, view, **options))

    def also(self, common: str, name: str) -> None:
        """Let trainers send what is registered as `name` under the name that a loaded model of transformers has for it, too."""
        full = self.slot(name, torch.empty(0)).name
        own = next(slot for slot in reversed(self.slots) if slot.name == full)
        self.register(common, own.view, shape=own.shape, covers=[own])

    def parameter(self, name: str, *shape: int, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        """New storage under a name of its own."""
        view = self.tensor(*shape, dtype=dtype)
        self.register(name, view, **options)
        return view


class Linear:
    """A product with one or several matrices of a checkpoint, stacked by output."""

    def __init__(self, scope: Scope, num_inputs: int, outputs: dict[str, int], bias: bool = False, named: bool = True):
        """`named`: the matrices are registered under the names of their outputs."""
        self._arithmetic = scope.arithmetic
        self.sizes = list(outputs.values())
        self.weight_ND = scope.tensor(sum(self.sizes), num_inputs)
        self.bias_N = scope.tensor(sum(self.sizes)) if bias else None
        scope.matrices.append(self.weight_ND)
        if not named:
            return
        for name, part in zip(outputs, torch.split(self.weight_ND, self.sizes), strict=True):
            scope.register(f"{name}.weight", part)
        if self.bias_N is not None:
            for name, part in zip(outputs, torch.split(self.bias_N, self.sizes), strict=True):
                scope.register(f"{name}.bias", part)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """All outputs side by side."""
        return self._arithmetic.linear(x_TD, self.weight_ND, self.bias_N)


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
