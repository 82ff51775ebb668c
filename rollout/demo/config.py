"""What a demo run is. In: the user's choices. Out: a validated DemoConfig, as a file too. Never imports torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import batchgen
from rollout.demo.tasks import KINDS

BUNDLED_MODEL = Path(batchgen.__file__).parent / "assets" / "tiny-moe"
DEMO_KINDS = ("chain_sum", "products", "basic_arithmetic", "lcm", "fraction_simplification")
"""Kinds that the bundled model mostly answers at once and often wrongly, although it can work them out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """One training run: a seed, how much of everything, and the optimiser's settings."""

    seed: int = 0
    """Seed of the training questions, of the samples and of nothing else; the held-out questions are the same for all seeds."""
    rounds: int = 30
    """Rounds of sampling, training and pushing weights; at least 1."""
    prompts: int = 16
    """Questions a round."""
    samples: int = 8
    """Samples a question, at least 2: advantages compare them."""
    mini_batches: int = 2
    """Optimiser steps a round, at most `prompts`. From the second on, the importance ratio does its work."""
    max_tokens: int = 112
    """Longest response; worked ones take 20 to 90 tokens."""
    kinds: tuple[str, ...] = DEMO_KINDS
    """Task kinds, in equal shares."""
    held_out: int = 150
    """Questions that are never trained on, for the accuracy before and after."""
    held_out_samples: int = 4
    """Samples of each at temperature 1; one more is greedy."""
    learning_rate: float = 3e-4
    """AdamW's, after a warm-up of five optimiser steps."""
    clip_low: float = 0.2
    """An importance ratio below 1 - clip_low earns nothing more for a bad sample."""
    clip_high: float = 0.28
    """An importance ratio above 1 + clip_high earns nothing more for a good sample."""
    micro_batch_tokens: int = 4096
    """Most tokens in one forward and backward pass: bounds the trainer's memory."""
    num_threads: int = 2
    """CPU threads of the trainer."""
    model: str = str(BUNDLED_MODEL)
    """Folder of the weights that training starts from; the service serves the same."""
    wandb: str = "off"
    """off, offline or online."""

    def __post_init__(self) -> None:
        for name in ("rounds", "prompts", "mini_batches", "max_tokens", "held_out", "held_out_samples", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.samples < 2:
            raise ValueError(f"samples is at least 2, got {self.samples}")
        if self.mini_batches > self.prompts:
            raise ValueError(f"mini_batches is at most prompts = {self.prompts}, got {self.mini_batches}")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed is from 0 to 2^32 - 1, got {self.seed}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is positive, got {self.learning_rate}")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ValueError(f"kinds are some of {', '.join(KINDS)}; got {', '.join(unknown) or 'none'}")
        if self.wandb not in ("off", "offline", "online"):
            raise ValueError(f"wandb is off, offline or online, got {self.wandb!r}")

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "DemoConfig":
        """Read a saved one. TypeError for unknown names, ValueError for values out of range."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "kinds": tuple(fields["kinds"])})
