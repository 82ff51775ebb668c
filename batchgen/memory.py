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
        return "\n".join(f"{name:17}{value}" for name, value in rows)


def plan_memory(
    config: EngineConfig, *, weights_bytes: int, bytes_per_page: int, model_max_len: int, vocab_size: int, device_free_bytes: int | None
) -> MemoryPlan:
    """Split the device budget into weights and KV pages.

    `device_free_bytes`: free memory of the device before weights are loaded; None on CPU. Raises MemoryPlanError when the weights
    and at least two pages do not fit, saying what would.
    """
    logits_bytes = 4 * vocab_size * config.max_num_seqs
    budget = None if config.device_memory_gb is None else int(config.device_memory_gb * GB)
    if budget is None and device_free_bytes is not None:
        budget = int(device_free_bytes * (1 - GPU_WORKSPACE_FRACTION))
    if config.kv_gb is not None:
        kv_bytes = int(config.kv_gb * GB)
    elif budget is not None:
        kv_bytes = budget - weights_bytes - logits_bytes
    else:
        kv_bytes = int(DEFAULT_CPU_KV_GB * GB)
    wanted_len = model_max_len if config.max_model_len is None else config.max_model_len
    if wanted_len > model_max_len:
        raise MemoryPlanError(f"max_model_len {wanted_len} is over the model's own limit of {model_max_len}; lower it")
    most_useful = config.max_num_seqs * (-(-wanted_len // config.page_size) + 1) * 2
    num_pages = min(kv_bytes // bytes_per_page, most_useful)
    needed = weights_bytes + logits_bytes + 2 * bytes_per_page
    if num_pages < 2 or (budget is not None and weights_bytes + logits_bytes + num_pages * bytes_per_page > budget):
        got = f"device_memory_gb={(budget or 0) / GB:.3f}" if budget is not None else f"kv_gb={kv_bytes / GB:.6f}"
        raise MemoryPlanError(
            f"{got} is too small: weights take {weights_bytes / GB:.3f} GB, logits {logits_bytes / GB:.3f} GB and two KV pages "
            f"{2 * bytes_per_page / GB:.6f} GB; give at least {needed / GB:.3f} GB in all"
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=num_pages * bytes_per_page,
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=min(wanted_len, (num_pages - 1) * config.page_size),
        logits_bytes=logits_bytes,
    )
