"""How a router chooses. In: nothing. Out: a validated Routing. Never sees a token."""

from dataclasses import dataclass
from typing import Literal

from batchgen.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Scores of experts, which of them are chosen, and the weights of those."""

    num_experts: int
    num_experts_per_tok: int
    scoring: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """Over all experts; of each expert; softmax over the chosen ones."""
    num_groups: int = 1
    """Equal groups of consecutive experts, of which `num_kept_groups` may be chosen from (DeepSeek-V2 and V3)."""
    num_kept_groups: int = 1
    group_top: int = 1
    """A group counts the sum of that many of its best scores."""
    normalise: bool = False
    """Scale the chosen experts' weights to sum to 1."""
    scale: float = 1.0
    """Of the weights, at last."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelError(
                f"config.json: {self.num_experts_per_tok} experts per token (num_experts_per_tok) out of {self.num_experts} experts"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups or not 1 <= self.num_kept_groups <= self.num_groups:
            raise ModelError(
                f"config.json: {self.num_experts} experts cannot be routed within {self.num_kept_groups} (topk_group) of {self.num_groups} "
                "groups (n_group)"
            )
        if self.num_kept_groups * (self.num_experts // self.num_groups) < self.num_experts_per_tok:
            raise ModelError(
                f"config.json: {self.num_kept_groups} groups (topk_group) hold fewer than {self.num_experts_per_tok} experts per token"
            )
        if self.num_groups > self.num_kept_groups and self.num_experts // self.num_groups < self.group_top:
            raise ModelError(f"config.json: groups of {self.num_experts // self.num_groups} experts (n_group) are too small to be ranked")
