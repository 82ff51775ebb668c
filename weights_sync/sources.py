"""Where a trainer's tensors come from. In: a module, a dict, pairs, or a safetensors folder. Out: shapes, and tensors one at a time.

Tensors stay where they are (no copies, CPU or CUDA); those of a folder are read when they are asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from batchgen.errors import WeightUpdateError

Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | Path
"""What can be pushed. An iterator is read to its end first: the manifest comes before the data, so it holds references, not copies."""


class Source:
    """Named tensors: `shapes` and `dtypes` at once, the values by `get`."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtypes: dict[str, torch.dtype],
        get: Callable[[str], torch.Tensor],
        on_gpu: bool = False,
        in_memory: bool = True,
    ):
        self.shapes = shapes
        self.dtypes = dtypes
        self.get = get
        self.on_gpu = on_gpu
        self.in_memory = in_memory
        """Whether `get` returns the same memory each time, which the caller keeps until the push is over."""


def open_source(weights: Weights) -> Source:
    """WeightUpdateError when it is not a set of uniquely named, dense, floating-point tensors."""
    if isinstance(weights, str | Path):
        return _folder(Path(weights))
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict(keep_vars=True)
    return _named(weights.items() if isinstance(weights, Mapping) else weights)


def _named(pairs: Iterable[tuple[str, torch.Tensor]]) -> Source:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise WeightUpdateError(f"{name} is a {type(tensor).__name__}; push tensors")
        if name in tensors:
            raise WeightUpdateError(f"{name} comes twice; push every tensor once")
        if hasattr(tensor, "full_tensor"):
            raise WeightUpdateError(f"{name} is sharded over ranks; gather it with full_tensor() on every rank and push from one")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightUpdateError(f"{name} has no dense data ({'meta device' if tensor.is_meta else tensor.layout}); push dense tensors")
        tensors[name] = tensor.detach()
    shapes, dtypes = {n: tuple(t.shape) for n, t in tensors.items()}, {n: t.dtype for n, t in tensors.items()}
    return _checked(Source(shapes, dtypes, tensors.__getitem__, on_gpu=any(t.is_cuda for t in tensors.values())))


def _folder(path: Path) -> Source:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightUpdateError(f"{path} holds no *.safetensors files")
    handles: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        try:
            handle: Any = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118 - a safe_open handle is not a mapping
                if name in handles:
                    raise WeightUpdateError(f"{name} is in {file} and in another file of {path}; push every tensor once")
                part = handle.get_slice(name)
                handles[name], shapes[name], dtypes[name] = handle, tuple(part.get_shape()), _SAFETENSORS.get(part.get_dtype(), torch.uint8)
        except (SafetensorError, OSError) as error:
            raise WeightUpdateError(f"{file} cannot be read: {error}; write it again") from None

    def get(name: str) -> torch.Tensor:
        tensor: torch.Tensor = handles[name].get_tensor(name)
        return tensor

    return _checked(Source(shapes, dtypes, get, in_memory=False))


_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _checked(source: Source) -> Source:
    if not source.shapes:
        raise WeightUpdateError("there is nothing to push: no tensors were given")
    for name, dtype in source.dtypes.items():
        if dtype not in _SAFETENSORS.values():
            raise WeightUpdateError(f"{name} has dtype {dtype}; push floating-point tensors (float64, float32, float16, bfloat16)")
    return source
