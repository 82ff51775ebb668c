"""From a checkpoint folder to a loaded model. In: folder, dtype, device. Out: LoadedModel. Never schedules or samples."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from batchgen.arithmetic import Arithmetic
from batchgen.errors import ModelError
from batchgen.loader import Checkpoint, check_weights, load_weights
from batchgen.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm5_next,
    glm_moe_dsa,
    gpt_oss,
    kimi_k3,
    kimi_k25,
    kimi_linear,
    llama,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import Decoder
from batchgen.quant.read import Quantization, read_quantization
from batchgen.weights import WeightStore, WeightTable


class Family(Protocol):
    """A module of this folder."""

    ARCHITECTURE: str

    def read_config(self, values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig: ...


_MODULES: tuple[Family, ...] = (
    qwen3_moe,
    qwen2_moe,
    olmoe,
    mixtral,
    qwen3,
    llama,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    kimi_k25,
    glm_moe_dsa,
    minimax_m2,
    gpt_oss,
    qwen3_next,
    kimi_linear,
    kimi_k3,
    glm5_next,
)
FAMILIES = {family.ARCHITECTURE: family for family in _MODULES}
"""By the first of `architectures` in config.json."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and what the engine must know about it."""

    model: Decoder
    config: ModelConfig
    store: WeightStore
    dtype: torch.dtype
    """Type of weights and KV."""
    device: torch.device
    fingerprint: str
    """Hex digest of config.json and the safetensors headers."""


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The folder's configuration; ModelError for an architecture that is not known."""
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    family = FAMILIES.get(str(name).replace("_", ""))  # transformers writes Kimi_K25, the hub has KimiK25
    if family is None:
        raise ModelError(f"{checkpoint.folder}/config.json: architectures is {name!r:.100}; known: {', '.join(sorted(FAMILIES))}")
    return family.read_config(checkpoint.config, checkpoint.generation_config)


def choose_dtype(dtype: str, config: ModelConfig, stored: torch.dtype, device: torch.device, quantised: bool) -> torch.dtype:
    """`auto` is the checkpoint's type, by config.json or else as tensors are `stored` (GPT-OSS); on a CPU, where all arithmetic is float32,
    float32, but for quantised checkpoints, whose point is memory."""
    if dtype != "auto":
        return DTYPES[dtype]
    keeps = device.type != "cpu" or quantised
    return torch.bfloat16 if keeps and (config.dtype or str(stored)).endswith("bfloat16") else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model whose files and configuration fit each other, before any memory is taken for its weights."""

    checkpoint: Checkpoint
    config: ModelConfig
    quantization: Quantization | None
    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    weights_bytes: int
    """What the weights will take."""

    def load(self) -> LoadedModel:
        """Read the checkpoint into fused storage."""
        arithmetic = Arithmetic(storage_dtype=self.dtype, device=self.device, deterministic=self.deterministic)
        model = Decoder(self.config, arithmetic, self.quantization)
        table = _table(model)
        load_weights(self.checkpoint, table)
        if self.deterministic:
            arithmetic.check_invariance(model.matrices)
        fingerprint = self.checkpoint.fingerprint()
        return LoadedModel(
            model=model, config=self.config, store=WeightStore(table), dtype=self.dtype, device=self.device, fingerprint=fingerprint
        )


def outline_model(folder: str, dtype: str, device: str | torch.device, deterministic: bool) -> Outline:
    """Compare all that the folder says of the model. ModelError says what is wrong with it."""
    device = torch.device(device)
    checkpoint = Checkpoint(folder)
    config = read_model_config(checkpoint)
    quantization = read_quantization(checkpoint.config, str(checkpoint.folder / "config.json"), stored=checkpoint.stored)
    storage_dtype = choose_dtype(dtype, config, checkpoint.float_dtype, device, quantised=quantization is not None)
    if config.num_layers > len(checkpoint.stored):
        raise ModelError(f"config.json: num_hidden_layers is {config.num_layers}, but {folder} has {len(checkpoint.stored)} tensors in all")
    nowhere = Arithmetic(storage_dtype=storage_dtype, device=torch.device("meta"), deterministic=False)
    table = _table(Decoder(config, nowhere, quantization))
    check_weights(checkpoint, table)
    return Outline(
        checkpoint=checkpoint,
        config=config,
        quantization=quantization,
        dtype=storage_dtype,
        device=device,
        deterministic=deterministic,
        weights_bytes=sum(tensor.nbytes for name in table.canonical for tensor in table.slots[name].tensors),
    )


def load_model(folder: str, dtype: str, device: str | torch.device, deterministic: bool) -> LoadedModel:
    """Read a checkpoint into fused storage. ModelError, before memory is filled, says what is wrong with the folder."""
    return outline_model(folder, dtype, device, deterministic).load()


def _table(model: Decoder) -> WeightTable:
    renamed = getattr(FAMILIES[model.config.architecture], "RENAMED", ())
    return WeightTable(model.slots, renamed, model.config.ignored)
