"""Checkpoint folders. In: a path with config.json and *.safetensors. Out: tensors by name, one shard at a time, and a fingerprint.
Never builds a model.
"""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.errors import ModelError, WeightUpdateError
from batchgen.quant.format import Parts
from batchgen.quant.packed import Packed
from batchgen.weights import FLOATS, WeightFill, WeightTable, as_bytes, format_names

INDEX = "model.safetensors.index.json"
Natural = Annotated[int, msgspec.Meta(ge=0)]
FileName = Annotated[str, msgspec.Meta(pattern="^[ -~]{1,255}$")]
MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names of safetensors headers."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a shard's header says about a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class Checkpoint:
    """A folder in Hugging Face layout, checked to be readable."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ModelError(f"model folder {str(self.folder)!r} does not exist; pass a local folder in Hugging Face layout")
        self.config = self._json("config.json")
        self.generation_config = self._json("generation_config.json") if (self.folder / "generation_config.json").exists() else {}
        self.shards = self._find_shards()

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            raise ModelError(f"{self.folder} has no {name}; it is not a complete Hugging Face checkpoint")
        try:
            values = json.loads(path.read_bytes(), object_pairs_hook=_unique if name == INDEX else None)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON ({error}); copy the file again") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds {type(values).__name__}, not an object")
        return values

    def _find_shards(self) -> list[Path]:
        self._weight_map: dict[str, str] = {}
        if (self.folder / INDEX).exists():
            try:
                self._weight_map = msgspec.convert(self._json(INDEX).get("weight_map"), dict[str, FileName])
            except msgspec.ValidationError as error:
                raise ModelError(
                    f"{self.folder / INDEX}: weight_map names a file for each tensor ({error}); copy the file again"
                ) from error
            names = sorted(set(self._weight_map.values()))
            if any(Path(name).name != name for name in names):
                raise ModelError(f"{self.folder / INDEX} names files outside the folder")
        else:
            names = ["model.safetensors"]
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent:
            raise ModelError(f"{self.folder} lacks weight files: {format_names(absent)}; only safetensors are read")
        if not names:
            raise ModelError(f"{self.folder / INDEX}: weight_map is empty; copy the file again")
        return [self.folder / name for name in names]

    def fingerprint(self) -> str:
        """Hex digest of config.json and of every shard's header."""
        digest = hashlib.blake2b((self.folder / "config.json").read_bytes(), digest_size=16)
        for shard in self.shards:
            digest.update(_header(shard)[0])
        return digest.hexdigest()

    @functools.cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Every tensor, from the shards' headers alone. ModelError for a name that is in two shards, or that the index places in another
        shard than the one that has it."""
        stored: dict[str, StoredTensor] = {}
        for shard in self.shards:
            for name, entry in _header(shard)[1].items():
                if name in stored:
                    raise ModelError(f"{self.folder}: tensor {name} is in both {stored[name].file} and {shard.name}; remove one")
                if entry.dtype not in DTYPES:
                    raise ModelError(f"{shard}: {name} has dtype {entry.dtype}; read: {', '.join(DTYPES)}")
                stored[name] = StoredTensor(entry.shape, DTYPES[entry.dtype], shard.name)
        misplaced = [name for name, file in self._weight_map.items() if name not in stored or stored[name].file != file]
        if misplaced:
            name = misplaced[0]
            where = f"{stored[name].file} has it" if name in stored else "no shard has it"
            raise ModelError(f"{self.folder / INDEX} places {name} in {self._weight_map[name]}, but {where}; copy the folder again")
        return stored

    @property
    def float_dtype(self) -> torch.dtype:
        """The type, of those that need no scales, that most values are stored in."""
        sizes = dict.fromkeys(FLOATS, 0)
        for entry in self.stored.values():
            if entry.dtype in sizes:
                sizes[entry.dtype] += math.prod(entry.shape)
        return max(FLOATS, key=lambda dtype: sizes[dtype])

    def tensors(self, ignored: tuple[str, ...] = ()) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, but those whose names start with `ignored`; at most one shard is open at a time."""
        for shard in self.shards:
            _header(shard)
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        if not name.startswith(ignored):
                            yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise ModelError(f"{shard} cannot be read ({error}); copy the file again") from error


def check_weights(checkpoint: Checkpoint, table: WeightTable) -> None:
    """ModelError lists names that are missing or that the model does not have, or names a tensor whose shape or type contradicts
    config.json; by the shards' headers alone, whatever memory the table stands for."""
    stored: dict[str, StoredTensor] = {}
    for name, entry in checkpoint.stored.items():
        if not name.startswith(table.ignored):
            if table.own_name(name) in stored:
                raise ModelError(f"{checkpoint.folder / entry.file}: {name} is there under another name, too; remove one")
            stored[table.own_name(name)] = entry
    _check_names(checkpoint, table, stored)
    for name, entry in stored.items():
        _check_tensor(f"{checkpoint.folder / entry.file}: {name}", name, entry, table)


def load_weights(checkpoint: Checkpoint, table: WeightTable) -> None:
    """Fill the parameters of a model that `check_weights` has passed; tensors that the table ignores are left alone. ModelError names file
    and tensor of values that no model has."""
    fill, parts = WeightFill(table, place=lambda view: view), _PartFill(table)
    for name, tensor in checkpoint.tensors(table.ignored):
        own = table.own_name(name)
        try:
            (parts if own in table.parts else fill).put(name, tensor)
        except (WeightUpdateError, ModelError) as error:
            raise ModelError(f"{checkpoint.folder / checkpoint.stored[name].file}: {error}") from error


def _check_names(checkpoint: Checkpoint, table: WeightTable, stored: dict[str, StoredTensor]) -> None:
    plain = {name: slot for name, slot in table.slots.items() if slot.form is None}
    unexpected = [name for name in stored if name not in table.parts and name not in plain]
    present = [plain[name] for name in stored if name in plain]
    known = {part.name for slot in present for part in slot.covers} | {slot.alias_of for slot in present} | stored.keys()
    missing = [name for name in (*filter(plain.__contains__, table.canonical), *table.parts) if name not in known]
    if missing or unexpected:
        parts = [f"lacks {len(missing)} parameters: {format_names(missing)}"] if missing else []
        parts += [f"has {len(unexpected)} that the model does not: {format_names(unexpected)}"] if unexpected else []
        raise ModelError(f"{checkpoint.folder} does not fit its config.json: it {' and '.join(parts)}")


def _check_tensor(where: str, name: str, entry: StoredTensor, table: WeightTable) -> None:
    if name in table.parts:
        slot, suffix = table.parts[name]
        slot.part_specs()[suffix].check(where, entry.shape, entry.dtype)
        return
    wanted = table.slots[name].checkpoint_shape
    if entry.shape != wanted:
        raise ModelError(f"{where} has shape {list(entry.shape)}, the model's is {list(wanted)} by config.json")
    if entry.dtype not in FLOATS:
        raise ModelError(
            f"{where} has dtype {entry.dtype} without scales that go with it, or config.json has no quantization_config that says how to "
            "read it; copy the folder again"
        )


class _PartFill:
    """Packed tensors, each part straight into its place; a matrix is checked, or also decoded for the model, with its last part."""

    def __init__(self, table: WeightTable):
        self._table = table
        self._open: dict[str, tuple[Parts, set[str]]] = {}
        """Storage of matrices that are not complete, and the suffixes that are still to come."""

    def put(self, name: str, tensor: Tensor) -> None:
        slot, suffix = self._table.parts[self._table.own_name(name)]
        form, view = slot.form, slot.view
        assert form is not None
        if slot.name not in self._open:
            parts = view.parts if isinstance(view, Packed) else form.allocate(tuple(view.shape))
            self._open[slot.name] = parts, set(form.suffixes)
        parts, missing = self._open[slot.name]
        part = slot.arranged_part(slot.part_specs()[suffix].convert(tensor), parts[suffix].shape)
        as_bytes(parts[suffix]).copy_(as_bytes(part))
        missing.remove(suffix)
        if missing:
            return
        form.check(parts, slot.name)
        if isinstance(view, Tensor):
            view.copy_(form.decode(parts, view.dtype))
        del self._open[slot.name]


class _Entry(msgspec.Struct):
    """A tensor in a shard's header."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} is there twice")
    return values


def _header(shard: Path) -> tuple[bytes, dict[str, _Entry]]:
    """The JSON header, as it is and read, after checking that the file is as long as the header says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{shard} is cut short or not a safetensors file ({size} bytes); copy the file again")
        header = file.read(length)
    try:
        values = json.loads(header, object_pairs_hook=_unique)
        values.pop("__metadata__", None)
        entries = msgspec.convert(values, dict[str, _Entry])
    except (ValueError, AttributeError, TypeError, RecursionError, msgspec.ValidationError) as error:
        raise ModelError(f"{shard} has a damaged header ({error}); copy the file again") from error
    expected = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != expected:
        fault = "cut short" if size < expected else "damaged"
        raise ModelError(f"{shard} has {size} bytes, its header says {expected}: the file is {fault}; copy it again")
    return header, entries
