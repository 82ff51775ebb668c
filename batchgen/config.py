"""Engine configuration. In: the user's choices. Out: a validated EngineConfig. Never imports torch."""

import math
import re
from dataclasses import dataclass
from typing import Literal

MAX_SEQS = 1 << 16
MAX_THREADS = 1024
MAX_SPECULATIVE_TOKENS = 15
Dtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine needs to know before it starts."""

    model: str
    """Folder with config.json, *.safetensors and tokenizer files in Hugging Face layout."""
    dtype: Dtype = "auto"
    """Type of KV and of weights that are not quantised. `auto`: the checkpoint's; on a CPU float32, unless the checkpoint is quantised."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    device_memory_gb: float | None = None
    """GB (1e9 bytes) for weights + KV + workspace. None: the device's free memory (GPU), or weights + `kv_gb` (CPU)."""
    kv_gb: float | None = None
    """GB for KV pages. None: what is left of device_memory_gb, else 1 GB on CPU."""
    host_memory_gb: float | None = None
    """Has no effect but a warning: KV that must make room is computed again, none is kept on the host."""
    seed: int = 0
    """Run seed: base of every sample's seed unless the request brings its own."""
    deterministic: bool = False
    """Batch-invariant computation: tokens and logprobs are bit-identical whatever the batch mates, chunking or preemption."""
    page_size: int = 16
    """Tokens per KV page."""
    max_num_seqs: int = 256
    """Most sequences decoded together; at most 65,536."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one forward pass."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens. None: the model's own limit."""
    decision_interval: int = 16
    """Decode steps between two visits of the scheduler, at most."""
    num_speculative_tokens: int = 0
    """Most tokens guessed at a time from what was seen before, while few sequences are live and it is faster. Results stay the same."""
    num_threads: int | None = None
    """CPU threads for torch, at most 1,024. None: torch's default."""

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype is auto, float32 or bfloat16, got {self.dtype!r}")
        if not (isinstance(self.device, str) and re.fullmatch(r"cpu|cuda(:\d+)?", self.device)):
            raise ValueError(f"device is cpu, cuda or cuda:N, got {self.device!r}")
        counts = ("page_size", "max_num_seqs", "max_num_batched_tokens", "decision_interval", "num_speculative_tokens", "seed")
        for name in (*counts, "max_model_len", "num_threads"):
            value = getattr(self, name)
            if type(value) is not int and (value is not None or name not in ("max_model_len", "num_threads")):
                raise ValueError(f"{name} is an integer, got {value!r}")
        for name in ("device_memory_gb", "kv_gb", "host_memory_gb"):
            value = getattr(self, name)
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{name} is a number or None, got {value!r}")
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens is 0 to {MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is a power of two, got {self.page_size}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "decision_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("device_memory_gb", "kv_gb", "host_memory_gb", "max_model_len", "num_threads"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is positive or None, got {value}")
        for name, most in (("max_num_seqs", MAX_SEQS), ("num_threads", MAX_THREADS)):
            if (getattr(self, name) or 0) > most:
                raise ValueError(f"{name} is at most {most}, got {getattr(self, name)}")
        if type(self.deterministic) is not bool:
            raise ValueError(f"deterministic is true or false, got {self.deterministic!r}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is an unsigned 64-bit integer, got {self.seed}")
