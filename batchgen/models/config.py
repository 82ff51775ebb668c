"""What a checkpoint's config.json says, in our words. In: the parsed json. Out: a validated ModelConfig. Never reads a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from batchgen.kv_cache import CacheLayout, HeadSizes, PageShape
from batchgen.models.pass_context import Pass, RotaryTables
from batchgen.models.reader import MAX_TABLE, ConfigReader
from batchgen.models.scope import RmsNorm, Scope
from batchgen.moe.expert_sum import ExpertSum


class Mixer(Protocol):
    """What lets a token see others: attention, or a state that is carried on."""

    def __call__(self, x_TD: Tensor, run: Pass) -> Tensor: ...


class MixerSpec(Protocol):
    """Configuration of a mixer."""

    @property
    def pages(self) -> tuple[PageShape, ...]: ...
    @property
    def states(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def heads(self) -> HeadSizes | None:
        """Of attention to whatever keys it has in its first store; None of anything else."""
        ...

    @property
    def plain(self) -> bool:
        """Whether it is causal attention to all keys and nothing else."""
        ...

    def build(self, scope: Scope, tables: RotaryTables, store: int, state: int) -> Mixer:
        """`store` and `state`: number of this layer's first store and state in the cache."""
        ...


class FeedForward(Protocol):
    """What each token goes through by itself."""

    def __call__(self, x_TD: Tensor) -> tuple[Tensor | None, Tensor | ExpertSum, Tensor | None]:
        """What is to be added to the residual stream, in one or two parts, and the router's choice ids_TK where there is one."""
        ...


class Layer(Protocol):
    """A pre-norm layer."""

    @property
    def input_norm(self) -> RmsNorm: ...
    @property
    def mixer(self) -> Mixer: ...
    @property
    def post_norm(self) -> RmsNorm: ...
    @property
    def feed_forward(self) -> FeedForward: ...


class Residuals(Protocol):
    """What layers read and add to, where it is not a plain residual stream."""

    def run(self, layers: Sequence[Layer], norm: RmsNorm, x_TD: Tensor, run: Pass) -> tuple[Tensor, list[Tensor]]:
        """From embeddings to normed hidden states, and the router's choice ids_TK of each MoE layer."""
        ...


class ResidualsSpec(Protocol):
    """Configuration of residuals."""

    def build(self, scope: Scope, num_layers: int) -> Residuals: ...


class FeedForwardSpec(Protocol):
    """Configuration of a feed-forward layer."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...

    def build(self, scope: Scope) -> FeedForward: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """A pre-norm layer."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own type: `float32`, `bfloat16` or `float16`; empty where config.json does not say."""
    residuals: ResidualsSpec | None = None
    """None: a plain residual stream."""
    norm_offset: float = 0.0
    """Added to the stored gains of the residual stream's norms."""
    prefix: str = "model"
    """Of the decoder's names in the checkpoint."""
    head: str = "lm_head"
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors that checkpoints bring and this engine does not use, such as layers for multi-token prediction."""

    @property
    def cache_layout(self) -> CacheLayout:
        """What sequences leave behind on the device, layer by layer."""
        return CacheLayout(
            pages=tuple(shape for layer in self.layers for shape in layer.mixer.pages),
            states=tuple(shape for layer in self.layers for shape in layer.mixer.states),
        )

    @property
    def heads(self) -> HeadSizes | None:
        """If every layer that attends has the same."""
        kinds = {layer.mixer.heads for layer in self.layers if layer.mixer.pages}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def plain(self) -> bool:
        """Whether every layer that attends does so to all keys and nothing else."""
        return all(layer.mixer.plain for layer in self.layers if layer.mixer.pages)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 in dense models."""
        return max(layer.feed_forward.num_experts for layer in self.layers)

    @property
    def num_experts_per_tok(self) -> int:
        return max(layer.feed_forward.num_experts_per_tok for layer in self.layers)


def read_decoder(
    reader: ConfigReader, generation: dict[str, Any], *, layers: list[LayerConfig], hidden_act: str = "silu", **family: Any
) -> ModelConfig:
    """ModelConfig of a config.json and generation_config.json: what all families name alike, and `family`'s own fields, which win.

    Raises ModelError for missing or contradictory fields and for what no family here computes.
    """
    reader.refuse("hidden_act", (hidden_act,))
    reader.refuse("use_sliding_window", (False,))
    eos = ConfigReader(generation).integers("eos_token_id", default=reader.integers("eos_token_id", default=[]))
    fields: dict[str, Any] = {
        "vocab_size": reader.integer("vocab_size", most=MAX_TABLE),
        "hidden_size": reader.integer("hidden_size"),
        "layers": tuple(layers),
        "rms_norm_eps": reader.number("rms_norm_eps", default=1e-6),
        "max_position_embeddings": reader.context,
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "eos_token_ids": tuple(eos),
        "dtype": str(reader.get("dtype", "torch_dtype", default="")),
    }
    return ModelConfig(**(fields | family))
