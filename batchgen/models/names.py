"""What a family calls its parameters on disk. In: nothing. Out: names. Never touches a tensor."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Parts of Hugging Face names that differ between families. A loaded model of transformers has `mlp.experts` and `mlp.gate` in all."""

    moe: str = "mlp"
    """The layer of experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """An expert's projections."""
