"""Small quantised checkpoints for tests, in the layouts of published ones, and what an independent decoder makes of them."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quant_reference as reference
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from batchgen.quant.format import Format, Parts
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import Mxfp4Blocks, Mxfp4Packed

Tensors = dict[str, torch.Tensor]
LINEAR = re.compile(r"layers\..+_proj(_with_mqa)?\.weight$")
ROUTED = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


def compressed(kind: str, weights: dict[str, Any], ignore: list[str]) -> dict[str, Any]:
    """As compressed-tensors writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "symmetric": True, "strategy": "group", **weights},
        "input_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A way that checkpoints are published."""

    family: str
    sizes: dict[str, Any]
    """Of the small model, so that its matrices have several blocks."""
    form: Format
    config: dict[str, Any]
    """Its quantization_config."""
    names: re.Pattern[str]
    """Of the tensors that are quantised."""
    decode: Callable[[Parts], torch.Tensor]
    """Of one matrix, independent of ours."""
    inputs_first: bool = False
    """Unquantised tensors are the transpose."""


def _fp8(parts: Parts, block: tuple[int, int]) -> torch.Tensor:
    return torch.from_numpy(reference.fp8_matrix(parts[""].view(torch.uint8).numpy(), parts["_scale_inv"].numpy(), block))


def _mxfp4(parts: Parts) -> torch.Tensor:
    codes, scales = parts.values()
    return torch.from_numpy(reference.mxfp4_matrix(codes.flatten(1).numpy(), scales.numpy()))


def _int4(parts: Parts) -> torch.Tensor:
    return torch.from_numpy(reference.int4_matrix(parts["_packed"].numpy(), parts["_scale"].view(torch.uint16).numpy(), 32))


_IGNORE = ["lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
_QWEN = {
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
}

KINDS = {
    "deepseek_fp8": Kind(
        family="deepseek_v3",
        sizes={"hidden_size": 136, "moe_intermediate_size": 24, "q_lora_rank": 40},
        form=Fp8(),
        config=FP8,
        names=LINEAR,
        decode=lambda parts: _fp8(parts, (128, 128)),
    ),
    "qwen_fp8_small_blocks": Kind(
        family="qwen3_moe",
        sizes=_QWEN,
        form=Fp8(block=(16, 24), powers_of_two=True),
        config=FP8
        | {"weight_block_size": [16, 24], "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]},
        names=re.compile(r"layers\.(0\.mlp|[12]).+_proj\.weight$"),
        decode=lambda parts: _fp8(parts, (16, 24)),
    ),
    "gpt_oss_mxfp4": Kind(
        family="gpt_oss",
        sizes={"hidden_size": 64, "intermediate_size": 32},
        form=Mxfp4Blocks(),
        config=MXFP4,
        names=re.compile(r"\.experts\.(gate_up|down)_proj$"),
        decode=_mxfp4,
        inputs_first=True,
    ),
    "kimi_int4": Kind(
        family="deepseek_v3",
        sizes={"hidden_size": 64, "moe_intermediate_size": 32},
        form=Int4(),
        config=compressed("pack-quantized", {"type": "int", "group_size": 32}, _IGNORE),
        names=ROUTED,
        decode=_int4,
    ),
    "qwen_mxfp4": Kind(
        family="qwen3_moe",
        sizes=_QWEN,
        form=Mxfp4Packed(),
        config=compressed("mxfp4-pack-quantized", {"type": "float", "group_size": 32}, ["lm_head", r"re:.*mlp\.gate$"]),
        names=LINEAR,
        decode=_mxfp4,
    ),
}


def write(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Replace a folder's weights, and fields of its configuration."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))


def quantise(kind: Kind, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors as such a checkpoint stores them, and, under their plain names, as an independent decoder reads those."""
    stored, decoded = dict(tensors), dict(tensors)
    for name in filter(kind.names.search, tensors):
        weight = stored.pop(name)
        parts = kind.form.encode(weight.mT if kind.inputs_first else weight)
        stored |= {kind.form.names(name)[suffix]: part for suffix, part in parts.items()}
        stack = [parts] if weight.dim() == 2 else [kind.form.select(parts, index) for index in range(len(weight))]
        matrices = torch.stack([kind.decode(matrix) for matrix in stack]).view(kind.form.shape(parts))
        decoded[name] = matrices.mT if kind.inputs_first else matrices
    return stored, decoded


def checkpoints(name: str, folder: Path, seed: int = 0) -> tuple[Path, Path, Path]:
    """A quantised checkpoint, its plain twin with the values that an independent decoder reads, and the one that both were made from."""
    kind = KINDS[name]
    source = tiny_model(kind.family, folder / "source", seed, **kind.sizes)
    tensors = load_file(source / "model.safetensors")
    stored, decoded = quantise(kind, tensors)
    for path, values, config in ((folder / "packed", stored, {"quantization_config": kind.config}), (folder / "plain", decoded, {})):
        shutil.copytree(source, path)
        write(path, values, **config)
    return folder / "packed", folder / "plain", source
