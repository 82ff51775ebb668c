"""Parameters under their Hugging Face names. In: named tensors. Out: the same values in the engine's fused storage, all or nothing.
Never replaces a parameter's storage and never knows where tensors come from.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from batchgen.errors import WeightUpdateError
from batchgen.huge_pages import advise_huge_pages
from batchgen.quant.format import Format, PartSpec
from batchgen.quant.packed import Packed

MAX_NAMES_SHOWN = 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of tensors that need no scales beside them."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What the engine expects under a name."""

    shape: tuple[int, ...]
    dtype: str
    """The engine's storage type, bfloat16 for what it keeps packed; any of `FLOATS` may be sent and is converted."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A name and the part of a parameter's storage that it fills."""

    name: str
    view: Tensor | Packed
    covers: list["Slot"] = field(default_factory=list)
    """For a stacked name, or another name of the same tensor: the checkpoint's own names, one per part."""
    alias_of: str | None = None
    """For a tied name: the name that owns the storage."""
    shape: tuple[int, ...] | None = None
    """The tensor's shape in checkpoints, where it is not the view's; its values fill the view in row-major order."""
    offset: float = 0.0
    """Added to what is stored."""
    inputs_first: bool = False
    """The tensor is [..., inputs, outputs]; its packed parts are not."""
    alternating: bool = False
    """Outputs of two matrices alternate in the second dimension, in packed parts too; the view has the matrices one after the other."""
    decoded: Format | None = None
    """How checkpoints store what the engine does not keep packed."""

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        return tuple(self.view.shape) if self.shape is None else self.shape

    @property
    def form(self) -> Format | None:
        """How checkpoints store it, in parts; None: plainly."""
        return self.view.form if isinstance(self.view, Packed) else self.decoded

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the view consists of."""
        return tuple(self.view.parts.values()) if isinstance(self.view, Packed) else (self.view,)

    def part_specs(self) -> dict[str, PartSpec]:
        """Shapes and types of the parts in checkpoints, by suffix."""
        assert self.form is not None
        *stack, num_rows, depth = self.checkpoint_shape
        return self.form.storage((*stack, depth, num_rows) if self.inputs_first else self.checkpoint_shape)

    def arranged(self, tensor: Tensor) -> Tensor:
        """A tensor of `checkpoint_shape` in the view's shape and order."""
        return self.arranged_part(tensor.mT if self.inputs_first else tensor, self.view.shape)

    def arranged_part(self, part: Tensor, shape: torch.Size) -> Tensor:
        """A checkpoint's part in the shape and order of the view's part."""
        if self.alternating:
            part = part.reshape(len(part), -1, 2, *part.shape[2:]).transpose(1, 2)
        return part.reshape(shape)


def format_names(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class WeightTable:
    """All names of a model: the canonical ones, stacked ones that cover several of them, tied aliases."""

    def __init__(self, slots: list[Slot], renamed: tuple[tuple[str, str], ...] = (), ignored: tuple[str, ...] = ()):
        """`renamed`: pairs of a prefix that others write and the canonical one. `ignored`: prefixes of what the engine has no use for."""
        self.renamed, self.ignored = renamed, ignored
        self.slots = {slot.name: slot for slot in slots} | {part.name: part for slot in slots for part in slot.covers}
        self.canonical = [slot.name for slot in self.slots.values() if not slot.covers and slot.alias_of is None]
        self.specs = {name: _spec(self.slots[name]) for name in self.canonical}
        quantised = [(slot, slot.form) for slot in map(self.slots.__getitem__, self.canonical) if slot.form is not None]
        self.parts = {name: (slot, suffix) for slot, form in quantised for suffix, name in form.names(slot.name).items()}
        """What checkpoints call the parts of quantised tensors: each one's slot, and the part's suffix."""

    def own_name(self, name: str) -> str:
        """What this model calls the tensor; the name itself where nothing else is known."""
        own = (ours + name.removeprefix(theirs) for theirs, ours in (("", ""), *self.renamed) if name.startswith(theirs))
        return next((each for each in own if each in self.slots or each in self.parts), name)

    def storages(self) -> list[Tensor]:
        """Each parameter's whole storage once, as a flat tensor."""
        views = {view.untyped_storage().data_ptr(): view for slot in self.slots.values() for view in slot.tensors}
        return [_flat(view) for view in views.values()]


class WeightFill:
    """Checks named tensors one by one and copies each to its place; `place` maps a slot's view to the memory that is filled."""

    def __init__(self, table: WeightTable, place: Callable[[Tensor], Tensor]):
        self._table = table
        self._place = place
        self._filled: set[str] = set()
        self._early_aliases: dict[str, str] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy `tensor` to its place, or leave it aside if the engine has no use for it. WeightUpdateError for an unknown, repeated,
        misshapen, non-floating or non-finite tensor; what was put before stays valid and the name can be sent again."""
        slot = self._table.slots.get(self._table.own_name(name))
        if slot is None:
            if name.startswith(self._table.ignored):
                return
            raise WeightUpdateError(f"the model has no parameter {name!r}; names are those of its Hugging Face checkpoint")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            what = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else f"of {type(tensor)}"
            raise WeightUpdateError(f"{name} is {what}; send dense torch tensors with their values")
        if tuple(tensor.shape) != slot.checkpoint_shape:
            raise WeightUpdateError(f"{name} has shape {list(tensor.shape)}, the model's is {list(slot.checkpoint_shape)}")
        if tensor.dtype not in FLOATS:
            raise WeightUpdateError(f"{name} has dtype {tensor.dtype}; send {format_names(map(str, FLOATS))}")
        covered = [part.name for part in slot.covers] or [slot.name]
        repeated = [each for each in covered if each in self._filled]
        if repeated:
            what = "was sent already" if repeated == [slot.name] else f"covers {format_names(repeated)}, sent already"
            raise WeightUpdateError(f"{name} {what}; send every parameter once per version")
        tensor = slot.arranged(tensor.detach())
        if isinstance(slot.view, Packed):
            parts = {suffix: self._place(part) for suffix, part in slot.view.parts.items()}
            slot.view.form.encode(tensor, into=parts, name=name)
            self._filled.update(covered)
            return
        target = self._place(slot.view)
        if slot.alias_of is not None:
            self._put_alias(slot.name, slot.alias_of, target, tensor)
            return
        early = self._early_aliases.get(slot.name)
        if early is not None and not torch.equal(target, tensor.to(target)):
            raise WeightUpdateError(f"{name} and {early} are tied in this model but differ; send equal tensors or only {name}")
        self._copy(name, target, tensor)
        if slot.offset:
            target.add_(slot.offset)
        self._filled.update(covered)

    def missing(self) -> list[str]:
        """Canonical names that have not been filled."""
        return [name for name in self._table.canonical if name not in self._filled]

    def _put_alias(self, name: str, owner: str, target: Tensor, tensor: Tensor) -> None:
        if owner not in self._filled:
            self._copy(name, target, tensor)
            self._early_aliases[owner] = name
        elif not torch.equal(target, tensor.to(target)):
            raise WeightUpdateError(f"{name} and {owner} are tied in this model but differ; send equal tensors or only {owner}")
        self._filled.add(name)

    @staticmethod
    def _copy(name: str, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor)
        # A sum is finite unless a value is not, or it overflows: 50 times faster than looking at each value, which then decides.
        checked = tensor if tensor.dtype == target.dtype else target
        if not math.isfinite(checked.sum().item()) and not torch.isfinite(target).all():
            raise WeightUpdateError(f"{name} has values that are not finite in {target.dtype}; these weights are broken")


class WeightStage(WeightFill):
    """New weights in memory of their own, until `commit` copies them over the live ones."""

    def __init__(self, store: "WeightStore", version: int):
        live = {flat.data_ptr(): flat for flat in store.table.storages()}
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {
            ptr: (flat, advise_huge_pages(torch.empty_like(flat))) for ptr, flat in live.items()
        }
        super().__init__(store.table, self._staged)
        self._store = store
        self.version = version

    def _staged(self, view: Tensor) -> Tensor:
        self._require_open()
        _, staging = self._pairs[view.untyped_storage().data_ptr()]
        return staging.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())

    def _require_open(self) -> None:
        if self._store.stage is not self:
            raise WeightUpdateError(f"the stage of version {self.version} is closed; open a new one")

    def discard(self) -> None:
        """Drop everything; the live weights were never touched. Harmless when already closed."""
        if self._store.stage is self:
            self._store.stage = None
        self._pairs.clear()

    def commit(self) -> None:
        """Copy the staged weights into the live storage. WeightUpdateError, and nothing changes, when a name is missing."""
        self._require_open()
        missing = self.missing()
        if missing:
            raise WeightUpdateError(f"version {self.version} lacks {len(missing)} parameters: {format_names(missing)}; send them all")
        for live, staging in self._pairs.values():
            live.copy_(staging)
        self._store.version = self.version
        self.discard()


class WeightStore:
    """The live parameters and their version; hands out one stage at a time."""

    def __init__(self, table: WeightTable, version: int = 0):
        self.table = table
        self.version = version
        self.stage: WeightStage | None = None

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Canonical checkpoint names, experts one by one, with the shapes that `put` expects."""
        return self.table.specs

    def open(self, version: int) -> WeightStage:
        """Begin an update. WeightUpdateError while another is open, or for a version that is not newer."""
        if self.stage is not None:
            raise WeightUpdateError(f"an update to version {self.stage.version} is open; commit or discard it first", retryable=True)
        if version <= self.version:
            raise WeightUpdateError(f"version {version} is not newer than the live version {self.version}; count upwards")
        self.stage = WeightStage(self, version)
        return self.stage


def _spec(slot: Slot) -> TensorSpec:
    dtype = torch.bfloat16 if isinstance(slot.view, Packed) else slot.view.dtype
    return TensorSpec(slot.checkpoint_shape, str(dtype).removeprefix("torch."))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, which torch copies twice as fast as float8; types of more than a byte as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _flat(view: Tensor) -> Tensor:
    """The whole storage behind `view` as one dimension."""
    return as_bytes(view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0))
