"""How much memory goes where. In: the model's sizes and the user's budgets. Out: a MemoryPlan or an early refusal. Never allocates."""

from dataclasses import dataclass

from batchgen.config import EngineConfig
from batchgen.errors import MemoryPlanError

GB = 1e9
DEFAULT_CPU_KV_GB = 1.0
GPU_WORKSPACE_FRACTION = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device, and the context that they allow."""

    weights_bytes: int
    kv_bytes: int
    num_pages: int
    page_size: int
    state_bytes: int
    num_states: int
    """Sequences and prefills that can hold a state at once; 0 where layers carry none."""
    max_model_len: int
    """Longest prompt + output: the model's or the user's limit, or what the pages hold if that is less."""
    logits_bytes: int
    """Largest float32 logits buffer of a step."""

    def table(self) -> str:
        """The plan as lines of text."""
        tokens = self.num_pages * self.page_size
        rows = [
            ("weights", f"{self.weights_bytes / GB:.3f} GB"),
            ("KV pages", f"{self.kv_bytes / GB:.3f} GB = {self.num_pages} pages of {self.page_size} = {tokens} tokens"),
            ("logits", f"{self.logits_bytes / GB:.3f} GB"),
            ("longest sequence", f"{self.max_model_len} tokens"),
        ]
        if self.num_states:
            rows.insert(2, ("states", f"{self.state_bytes / GB:.3f} GB = {self.num_states} sequences"))
        return "\n".join(f"{name:17}{value}" for name, value in rows)


def plan_memory(
    config: EngineConfig,
    *,
    weights_bytes: int,
    bytes_per_page: int,
    bytes_per_state: int = 0,
    model_max_len: int,
    vocab_size: int,
    device_free_bytes: int | None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Split the device budget into weights, states and KV pages.

    `device_free_bytes`: free memory of the device before weights are loaded; None on CPU, where `host_bytes` is what the machine has.
    Raises MemoryPlanError when the weights and at least two pages do not fit, saying what would.
    """
    logits_bytes = 4 * vocab_size * config.max_num_seqs
    num_states = config.max_num_seqs + 1 if bytes_per_state else 0  # a prompt keeps its own while its samples run
    state_bytes = bytes_per_state * (num_states + 1)
    fixed_bytes = weights_bytes + state_bytes + logits_bytes
    budget = None if config.device_memory_gb is None else int(config.device_memory_gb * GB)
    if budget is None and device_free_bytes is not None:
        budget = int(device_free_bytes * (1 - GPU_WORKSPACE_FRACTION))
    if config.kv_gb is not None:
        kv_bytes = int(config.kv_gb * GB)
    elif budget is not None:
        kv_bytes = budget - fixed_bytes
    else:
        kv_bytes = int(DEFAULT_CPU_KV_GB * GB)
    wanted_len = model_max_len if config.max_model_len is None else config.max_model_len
    if wanted_len > model_max_len:
        raise MemoryPlanError(f"max_model_len {wanted_len} is over the model's own limit of {model_max_len}; lower it")
    if wanted_len < 2:
        raise MemoryPlanError(
            "a context of 1 token has no room for a prompt and an answer; raise max_model_len (the model's: max_position_embeddings)"
        )
    most_useful = config.max_num_seqs * (-(-wanted_len // config.page_size) + 1) * 2
    num_pages = min(kv_bytes // bytes_per_page, most_useful)
    needed = fixed_bytes + 2 * bytes_per_page
    if num_pages < 2 or (budget is not None and fixed_bytes + num_pages * bytes_per_page > budget):
        got = f"device_memory_gb={(budget or 0) / GB:.3f}" if budget is not None else f"kv_gb={kv_bytes / GB:.6f}"
        raise MemoryPlanError(
            f"{got} is too small: weights take {weights_bytes / GB:.3f} GB, states {state_bytes / GB:.3f} GB, logits "
            f"{logits_bytes / GB:.3f} GB and two KV pages {2 * bytes_per_page / GB:.6f} GB; give at least {needed / GB:.3f} GB in all "
            f"or lower max_num_seqs, now {config.max_num_seqs}"
        )
    if budget is None and host_bytes is not None and fixed_bytes + num_pages * bytes_per_page > host_bytes:
        raise MemoryPlanError(
            f"the model needs {(fixed_bytes + num_pages * bytes_per_page) / GB:.3f} GB (weights {weights_bytes / GB:.3f}, states "
            f"{state_bytes / GB:.3f}, logits {logits_bytes / GB:.3f}, KV {num_pages * bytes_per_page / GB:.3f}), this machine has "
            f"{host_bytes / GB:.3f} GB; lower kv_gb or max_num_seqs, now {config.max_num_seqs}, or take a smaller model"
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=num_pages * bytes_per_page,
        num_pages=num_pages,
        page_size=config.page_size,
        state_bytes=state_bytes,
        num_states=num_states,
        max_model_len=min(wanted_len, (num_pages - 1) * config.page_size),
        logits_bytes=logits_bytes,
    )
