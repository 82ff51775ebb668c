"""From a configuration to the parts of an engine. In: EngineConfig. Out: loaded model, tokenizer, memory plan, model facts."""

import logging
import os
from pathlib import Path

import torch

from batchgen.config import EngineConfig
from batchgen.errors import ModelError
from batchgen.events import ModelFacts
from batchgen.memory import MemoryPlan, plan_memory
from batchgen.models.registry import LoadedModel, outline_model
from batchgen.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def assemble(config: EngineConfig) -> tuple[LoadedModel, Tokenizer | None, MemoryPlan, ModelFacts]:
    """Plan the memory and load the folder. Raises ModelError and MemoryPlanError, mostly before memory is filled."""
    if config.device.startswith("cuda"):
        _check_cuda(config.device)
    free_bytes = torch.cuda.mem_get_info(config.device)[0] if config.device.startswith("cuda") else None
    outline = outline_model(config.model, config.dtype, config.device, config.deterministic)
    model = outline.config
    tokenizer = Tokenizer.from_folder(config.model, num_ids=model.vocab_size)
    memory = plan_memory(
        config,
        weights_bytes=outline.weights_bytes,
        bytes_per_page=model.cache_layout.bytes_per_token(outline.dtype) * config.page_size,
        bytes_per_state=model.cache_layout.bytes_per_state,
        model_max_len=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        device_free_bytes=free_bytes,
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if free_bytes is None else None,
    )
    if config.host_memory_gb is not None:
        log.warning("host_memory_gb has no effect: KV that must make room is computed again, none is kept on the host")
    log.info("memory plan:\n%s", memory.table())
    loaded = outline.load()
    facts = ModelFacts(
        name=Path(config.model).resolve().name,
        architecture=model.architecture,
        fingerprint=loaded.fingerprint,
        vocab_size=min(model.vocab_size, tokenizer.vocab_size) if tokenizer else model.vocab_size,
        max_model_len=memory.max_model_len,
        eos_token_ids=tokenizer.eos_token_ids if tokenizer else list(model.eos_token_ids),
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        dtype=str(loaded.dtype).removeprefix("torch."),
        deterministic=config.deterministic,
        message_format=tokenizer.message_format if tokenizer else None,
    )
    return loaded, tokenizer, memory, facts


def _check_cuda(device: str) -> None:
    """ModelError when this torch cannot use the device."""
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise ModelError(f"device {device} is not there: torch {torch.__version__} sees {count} CUDA devices", code="no_device")
