"""Checkpoint folders. In: a path with config.json and *.safetensors. Out: tensors by name, one shard at a time, and a fingerprint.
Never builds a model.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.errors import ModelError, WeightUpdateError
from batchgen.weights import WeightFill, WeightTable, format_names

MAX_HEADER_BYTES = 100_000_000


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
            values = json.loads(path.read_bytes())
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON ({error}); copy the file again") from error
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds {type(values).__name__}, not an object")
        return values

    def _find_shards(self) -> list[Path]:
        self._weight_map: dict[str, str] = {}
        if (self.folder / "model.safetensors.index.json").exists():
            self._weight_map = self._json("model.safetensors.index.json").get("weight_map", {})
            names = sorted(set(self._weight_map.values()))
            if any(not isinstance(name, str) or Path(name).name != name for name in names):
                raise ModelError(f"{self.folder}/model.safetensors.index.json names files outside the folder")
        else:
            names = ["model.safetensors"]
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent or not names:
            raise ModelError(f"{self.folder} lacks weight files: {format_names(absent)}; only safetensors are read")
        return [self.folder / name for name in names]

    def fingerprint(self) -> str:
        """Hex digest of config.json and of every shard's header."""
        digest = hashlib.blake2b((self.folder / "config.json").read_bytes(), digest_size=16)
        for shard in self.shards:
            digest.update(_header(shard))
        return digest.hexdigest()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, from the shards' headers alone. ModelError for a name that is in two shards, or that the index places in
        another shard than the one that has it."""
        shard_of: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in self.shards:
            for name, entry in json.loads(_header(shard)).items():
                if name == "__metadata__":
                    continue
                if name in shard_of:
                    raise ModelError(f"{self.folder}: tensor {name} is in both {shard_of[name]} and {shard.name}; remove one")
                shard_of[name], shapes[name] = shard.name, tuple(entry["shape"])
        misplaced = [name for name, file in self._weight_map.items() if shard_of.get(name) != file]
        if misplaced:
            name = misplaced[0]
            where = f"{shard_of[name]} has it" if name in shard_of else "no shard has it"
            raise ModelError(
                f"{self.folder}/model.safetensors.index.json places {name} in {self._weight_map[name]}, but {where}; copy the folder again"
            )
        return shapes

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


def load_weights(checkpoint: Checkpoint, table: WeightTable) -> None:
    """Fill the model's parameters; tensors that the table ignores are left alone. ModelError, before any is filled, lists names that are
    missing or that the model does not have, and names a tensor whose shape contradicts config.json."""
    shapes = {table.own_name(name): shape for name, shape in checkpoint.shapes().items() if not name.startswith(table.ignored)}
    unexpected = [name for name in shapes if name not in table.slots]
    covered = {part.name for name in shapes if name in table.slots for part in table.slots[name].covers}
    owners = {table.slots[name].alias_of for name in shapes if name in table.slots}
    missing = [name for name in table.canonical if name not in shapes and name not in covered and name not in owners]
    if missing or unexpected:
        parts = [f"lacks {len(missing)} parameters: {format_names(missing)}"] if missing else []
        parts += [f"has {len(unexpected)} that the model does not: {format_names(unexpected)}"] if unexpected else []
        raise ModelError(f"{checkpoint.folder} does not fit its config.json: it {' and '.join(parts)}")
    for name, shape in shapes.items():
        wanted = table.slots[name].checkpoint_shape
        if shape != wanted:
            raise ModelError(f"{checkpoint.folder}: {name} has shape {list(shape)}, the model's is {list(wanted)}")
    fill = WeightFill(table, place=lambda view: view)
    for name, tensor in checkpoint.tensors(table.ignored):
        try:
            fill.put(name, tensor)
        except WeightUpdateError as error:
            raise ModelError(f"{checkpoint.folder}: {error}") from error


def _header(shard: Path) -> bytes:
    """The JSON header, after checking that the file is as long as the header says."""
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{shard} is cut short or not a safetensors file ({size} bytes); copy the file again")
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{shard} has a damaged header; copy the file again") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{shard} has {size} bytes, its header says {expected}: the file is cut short; copy it again")
    return header
