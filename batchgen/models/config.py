"""What a checkpoint's config.json says, in our words. In: the parsed json. Out: a validated ModelConfig. Never imports torch."""

from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a decoder with grouped-query attention and, in some layers, routed experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    moe_intermediate_size: int
    """Width of one expert."""
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    """Scale the chosen experts' probabilities to sum to 1."""
    moe_layers: tuple[int, ...]
    """Indices of the layers with experts; the others are dense."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own type: `float32`, `bfloat16` or `float16`."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"config.json: {name} is a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"config.json: {self.num_heads} query heads are not a multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim {self.head_dim} is odd; rotary embedding needs an even one")
        if self.moe_layers and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelError(f"config.json: {self.num_experts_per_tok} experts per token out of {self.num_experts} experts")


class ConfigReader:
    """Typed access to config.json with errors that name the key."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of `names` that is present; several names because transformers renamed keys."""
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is None:
            raise ModelError(f"config.json has no {' or '.join(names)}; the folder is not a complete Hugging Face checkpoint")
        return default

    def refuse(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Raise when the key asks for something that this family does not compute."""
        value = self._values.get(name)
        if value not in (None, *allowed):
            raise ModelError(f"config.json: {name} is {value!r}; supported: {', '.join(map(repr, allowed))}")
