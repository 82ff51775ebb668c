"""Multi-head latent attention. In: normed activations. Out: what attention adds. Never makes keys or values of single heads.

All heads' keys and values come from one small latent per token (DeepSeek-V2, 2024). The cache holds the latent and one rotated key that
all heads share; queries are taken into the latent's space and outputs out of it.

Shapes: T tokens, D model, N heads, n unrotated and R rotated size of a head's query, r size of the latent, v size of a head's value.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.kv_cache import HeadSizes, PageShape
from batchgen.models.indexer import Indexer, IndexerSpec
from batchgen.models.pass_context import Pass, RotaryTables
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import Rope, read_rope
from batchgen.models.scope import Linear, RmsNorm, Scope

LATENT_EPS = 1e-6
"""Of the norms of latents; in most families, whatever `rms_norm_eps` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Latent attention, and what families vary."""

    num_heads: int
    q_rank: int | None
    """Size of the latent that queries come from; None: straight from the activations."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope | None
    """None: the shared key is not rotated (Kimi-Linear)."""
    interleaved: bool = True
    """Rotated pairs lie side by side in checkpoints; else half a head apart."""
    bias: bool = False
    norm_eps: float = LATENT_EPS
    gated: bool = False
    """The output is multiplied by the sigmoid of a gate, `g_proj` (Kimi-K3)."""
    indexer: IndexerSpec | None = None
    """What chooses the keys that a token sees."""
    shares_choice: bool = False
    """It sees the keys that the last layer with an indexer chose; with neither, all."""

    states: ClassVar[tuple[tuple[int, ...], ...]] = ()
    plain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.indexer is not None and self.q_rank is None:
            raise ModelError("config.json: q_lora_rank is null; the indexer takes its queries from that latent")
        if self.rope_dim % 2:
            raise ModelError(f"config.json: qk_rope_head_dim is {self.rope_dim}; it takes an even number")

    @property
    def pages(self) -> tuple[PageShape, ...]:
        latent = PageShape(1, self.kv_rank + self.rope_dim, self.kv_rank, shares_keys=True)
        return (latent,) if self.indexer is None else (latent, *self.indexer.pages)

    @property
    def heads(self) -> HeadSizes | None:
        return None if self.indexer is not None or self.shares_choice else (self.num_heads, 1, self.kv_rank, self.rope_dim)

    @property
    def scale(self) -> float:
        """Of scores; yarn stretches it with `mscale_all_dim`."""
        scale = 1.0 / math.sqrt(self.nope_dim + self.rope_dim)
        if self.rope is None or self.rope.type == "default" or not self.rope.mscale_all_dim or self.rope.factor <= 1:
            return scale
        stretched = 0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1.0
        return scale * stretched * stretched

    def build(self, scope: Scope, tables: RotaryTables, store: int, state: int) -> "LatentAttention":
        """The layer under `self_attn`."""
        if self.rope is not None:
            tables.require(self.rope, self.rope_dim)
        return LatentAttention(self, scope / "self_attn", store)


def read_latent(reader: ConfigReader, **family: Any) -> Latent:
    """What all families name alike, and `family`'s own fields, which win."""
    fields: dict[str, Any] = {
        "num_heads": reader.count("num_attention_heads"),
        "q_rank": reader.integer("q_lora_rank") if reader.has("q_lora_rank") else None,
        "kv_rank": reader.integer("kv_lora_rank"),
        "nope_dim": reader.integer("qk_nope_head_dim"),
        "rope_dim": reader.integer("qk_rope_head_dim", least=0),
        "value_dim": reader.integer("v_head_dim"),
        "bias": reader.flag("attention_bias"),
    }
    if "rope" not in family:
        fields["rope"] = read_rope(reader, default_theta=10000.0)
    return Latent(**(fields | family))


class LatentAttention:
    """Projections into and out of the latent's space, rotation, and attention in it."""

    def __init__(self, spec: Latent, scope: Scope, store: int):
        self.spec, self.store, self.arithmetic = spec, store, scope.arithmetic
        width = spec.num_heads * (spec.nope_dim + spec.rope_dim)
        first = {"q_proj": width} if spec.q_rank is None else {"q_a_proj": spec.q_rank}
        self.queries = Linear(scope, scope.hidden_size, first, spec.bias and spec.q_rank is not None)
        self.keys = Linear(scope, scope.hidden_size, {"kv_a_proj_with_mqa": spec.kv_rank + spec.rope_dim}, spec.bias)
        self.q_norm = None if spec.q_rank is None else RmsNorm(scope, "q_a_layernorm", spec.q_rank, spec.norm_eps)
        self.second_queries = None if spec.q_rank is None else Linear(scope, spec.q_rank, {"q_b_proj": width})
        self.kv_norm = RmsNorm(scope, "kv_a_layernorm", spec.kv_rank, spec.norm_eps)
        width = spec.num_heads * (spec.nope_dim + spec.value_dim)
        # decoded when loaded: keys are multiplied by its transpose, across the blocks that share a scale
        heads_NXr = Linear(scope, spec.kv_rank, {"kv_b_proj": width}, unpacked=True).weight_ND.view(spec.num_heads, -1, spec.kv_rank)
        self.key_Nnr, self.value_Nvr = torch.split(heads_NXr, [spec.nope_dim, spec.value_dim], dim=1)
        self.gate = Linear(scope, scope.hidden_size, {"g_proj": spec.num_heads * spec.value_dim}) if spec.gated else None
        self.output = Linear(scope, spec.num_heads * spec.value_dim, {"o_proj": scope.hidden_size}, spec.bias)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and spec.q_rank is not None:
            self.indexer = Indexer(spec.indexer, scope / "indexer", spec.q_rank, store + 1)

    def __call__(self, x_TD: Tensor, run: Pass) -> Tensor:
        """[T, D]; writes the tokens' latents."""
        spec, store = self.spec, run.kv.stores[self.store]
        first_TX = self.queries(x_TD) if self.q_norm is None else self.q_norm(self.queries(x_TD))
        q_TX = first_TX if self.second_queries is None else self.second_queries(first_TX)
        q_TNn, q_TNR = torch.split(q_TX.view(len(x_TD), spec.num_heads, -1), [spec.nope_dim, spec.rope_dim], dim=2)
        latent_Tr, k_TR = torch.split(self.keys(x_TD), [spec.kv_rank, spec.rope_dim], dim=1)
        key_T1X = torch.cat((self.kv_norm(latent_Tr).unsqueeze(1), self._rotate(k_TR.unsqueeze(1), run)), dim=2)
        store.write(run.head_slots(1), key_T1X[: run.num_tokens])
        if self.indexer is not None:
            run.chosen_TC = self.indexer(x_TD, first_TX, run)
        q_TNr = self.arithmetic.head_products(q_TNn, self.key_Nnr, transposed=True)
        q_T1NX = torch.cat((q_TNr, self._rotate(q_TNR, run)), dim=2).unsqueeze(1)
        chosen_TC = run.chosen_TC if spec.indexer is not None or spec.shares_choice else None
        out_TNr = run.attend(q_T1NX, store, spec.scale, chosen_TC=chosen_TC).view(len(x_TD), spec.num_heads, -1)
        out_TX = self.arithmetic.head_products(out_TNr, self.value_Nvr).reshape(len(x_TD), -1)
        return self.output(out_TX if self.gate is None else self.arithmetic.sigmoid_times(self.gate(x_TD), out_TX))

    def _rotate(self, x_THR: Tensor, run: Pass) -> Tensor:
        if self.spec.rope is None:
            return x_THR
        return self.arithmetic.rotate(x_THR, run.rotary(self.spec.rope, self.spec.rope_dim), self.spec.interleaved)
