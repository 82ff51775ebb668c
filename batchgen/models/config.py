"""What a checkpoint's config.json says, in our words. In: the parsed json. Out: a validated ModelConfig. Never reads a tensor."""

from dataclasses import dataclass
from typing import Any, Literal

from batchgen.errors import ModelError
from batchgen.models.rotary import Rope, read_rope

QkNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a pre-norm decoder with grouped-query attention, rotary positions and, in some layers, routed experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: QkNorm
    """What is normed of queries and keys before rotation: nothing, each head, or the whole projection."""
    qkv_bias: bool
    output_bias: bool
    """Of the attention's output projection."""
    mlp_bias: bool
    """Of dense feed-forward layers."""
    clip_qkv: float | None
    """Queries, keys and values are clamped to this magnitude before rotation."""
    intermediate_size: int
    """Width of the dense feed-forward layers."""
    moe_intermediate_size: int
    """Width of one expert."""
    num_experts: int
    num_experts_per_tok: int
    shared_expert_intermediate_size: int
    """Width of an expert that every token meets, weighted by a sigmoid gate; 0: there is none."""
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


def refuse_short_window(values: dict[str, Any]) -> None:
    """ModelError if attention is limited to a window shorter than the context."""
    window, longest = values.get("sliding_window"), values.get("max_position_embeddings") or 0
    if window and window < longest:
        raise ModelError(
            f"config.json: sliding_window is {window}, shorter than the context of {longest}; only whole contexts are attended to"
        )


def read_decoder(values: dict[str, Any], generation: dict[str, Any], **family: Any) -> ModelConfig:
    """ModelConfig of a config.json and generation_config.json: what all families name alike, and `family`'s own fields, which win.

    Raises ModelError for missing or contradictory fields and for what no family here computes.
    """
    reader = ConfigReader(values)
    reader.refuse("hidden_act", ("silu",))
    reader.refuse("use_sliding_window", (False,))
    if values.get("quantization_config") is not None:
        method = dict(values["quantization_config"]).get("quant_method")
        raise ModelError(f"config.json: quantization_config asks for {method!r}; this family is read in float32, bfloat16 and float16")
    num_heads, hidden = reader.get("num_attention_heads"), reader.get("hidden_size")
    num_layers, num_experts = reader.get("num_hidden_layers"), family.get("num_experts", 0)
    step, dense = reader.get("decoder_sparse_step", default=1), reader.get("mlp_only_layers", default=[])
    eos = ConfigReader(generation).get("eos_token_id", default=reader.get("eos_token_id", default=[]))
    fields: dict[str, Any] = {
        "vocab_size": reader.get("vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": reader.get("num_key_value_heads", default=num_heads),
        "head_dim": reader.get("head_dim", default=hidden // max(1, num_heads)),
        "rms_norm_eps": reader.get("rms_norm_eps", default=1e-6),
        "rope": read_rope(values, default_theta=10000.0),
        "max_position_embeddings": reader.get("max_position_embeddings"),
        "tie_word_embeddings": reader.get("tie_word_embeddings", default=False),
        "qk_norm": "none",
        "qkv_bias": reader.get("attention_bias", default=False),
        "output_bias": reader.get("attention_bias", default=False),
        "mlp_bias": False,
        "clip_qkv": None,
        "intermediate_size": reader.get("intermediate_size", default=0),
        "moe_intermediate_size": 0,
        "num_experts": num_experts,
        "num_experts_per_tok": reader.get("num_experts_per_tok") if num_experts else 0,
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": reader.get("norm_topk_prob", default=False),
        "moe_layers": tuple(i for i in range(num_layers) if num_experts and i not in dense and (i + 1) % step == 0),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        "dtype": str(reader.get("dtype", "torch_dtype", default="float32")),
    }
    return ModelConfig(**(fields | family))
