"""What a job is. In: the user's choices. Out: a validated JobConfig. Never imports torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout.jobs.resume import ResumeMode


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """One run of `rollout run`."""

    input_path: Path
    """JSONL: OpenAI batch lines or plain prompts. A regular file."""
    output_path: Path
    """JSONL: one result a row, appended as rows finish. Not the input."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling fields for rows that do not bring their own; names as in a row."""
    seed: int = 0
    """Seed of the job; a row's seed is hash(seed, custom_id) unless the row has one."""
    resume: ResumeMode = "auto"
    """never: refuse when there is an earlier run. auto: go on if there is one. must: refuse when there is none."""
    dedupe: Literal["off", "exact"] = "off"
    """exact: rows with the same prompt and sampling are generated once and share the result."""
    sort: bool = False
    """Rewrite the output in input order once every row is done."""
    window: int = 1024
    """Samples in flight at once; with kill -9 at most their work is lost."""
    retries: int = 2
    """Further attempts for a row whose error may pass."""
    row_timeout_s: float = 3600.0
    """A row that takes longer is an error row. Seconds."""
    max_error_rate: float = 0.5
    """Stop when more than this share of the rows begun in this run failed; looked at from 200 rows on. 1 never stops."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed is an unsigned 64-bit integer, got {self.seed}")
        if self.resume not in ("never", "auto", "must"):
            raise ValueError(f"resume is never, auto or must, got {self.resume!r}")
        if self.dedupe not in ("off", "exact"):
            raise ValueError(f"dedupe is off or exact, got {self.dedupe!r}")
        if self.window < 1:
            raise ValueError(f"window is at least 1, got {self.window}")
        if self.retries < 0:
            raise ValueError(f"retries is not negative, got {self.retries}")
        if not self.row_timeout_s > 0:
            raise ValueError(f"row_timeout_s is positive, got {self.row_timeout_s}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate is from 0 to 1, got {self.max_error_rate}")
