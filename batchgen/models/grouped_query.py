"""Attention in which groups of query heads share a key and a value head. In: normed activations. Out: what attention adds.

Shapes: T tokens, D model, H KV heads, G query heads per KV head, d head size, N query heads, X outputs of a fused projection.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from batchgen.errors import ModelError
from batchgen.kv_cache import HeadSizes, PageShape
from batchgen.models.pass_context import Pass, RotaryTables
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import Rope, read_rope
from batchgen.models.scope import Linear, RmsNorm, Scope

QkNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQuery:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions, and what families vary."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    rotary_dim: int
    """First dimensions of each head that are rotated."""
    qk_norm: QkNorm = "none"
    """What is normed of queries and keys before rotation: nothing, each head, or the whole projection."""
    norm_offset: float = 0.0
    """Added to the stored gains of those norms."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the output projection."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to this magnitude before rotation."""
    window: int = 0
    """Last keys that a token sees; 0: all."""
    sinks: bool = False
    """A learned score per head takes part in the softmax and has no value."""
    gated: bool = False
    """The output is multiplied by the sigmoid of a gate, which the query projection also computes, head by head."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} query heads (num_attention_heads) are not a multiple of {self.num_kv_heads} KV heads "
                "(num_key_value_heads)"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ModelError(
                f"config.json: {self.rotary_dim} of {self.head_dim} dimensions of a head (head_dim, partial_rotary_factor) are rotated; it "
                "takes an even number"
            )

    @property
    def pages(self) -> tuple[PageShape, ...]:
        return (PageShape(self.num_kv_heads, self.head_dim, self.head_dim),)

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return ()

    @property
    def heads(self) -> HeadSizes:
        return self.num_heads, self.num_kv_heads, self.head_dim, 0

    @property
    def plain(self) -> bool:
        return not self.window and not self.sinks

    def build(self, scope: Scope, tables: RotaryTables, store: int, state: int) -> "GroupedQueryAttention":
        """The layer under `self_attn`."""
        tables.require(self.rope, self.rotary_dim)
        return GroupedQueryAttention(self, scope / "self_attn", store)


def read_grouped_query(reader: ConfigReader, **family: Any) -> GroupedQuery:
    """What all families name alike, and `family`'s own fields, which win."""
    num_heads = reader.count("num_attention_heads")
    head_dim = reader.integer("head_dim", default=max(1, reader.integer("hidden_size") // num_heads))
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": reader.count("num_key_value_heads", default=num_heads),
        "head_dim": head_dim,
        "rotary_dim": head_dim,
        "qkv_bias": reader.flag("attention_bias"),
        "output_bias": reader.flag("attention_bias"),
    }
    if "rope" not in family:
        fields["rope"] = read_rope(reader, default_theta=10000.0)
    return GroupedQuery(**(fields | family))


class GroupedQueryAttention:
    """Projections, rotation and attention over the paged KV."""

    def __init__(self, spec: GroupedQuery, scope: Scope, store: int):
        self.spec, self.store = spec, store
        self.arithmetic, self.eps = scope.arithmetic, scope.rms_norm_eps
        num_heads, num_kv_heads, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.sizes = [num_heads * d, num_kv_heads * d, num_kv_heads * d]
        outputs = {f"{name}_proj": size for name, size in zip("qkv", self.sizes, strict=True)}
        if spec.gated:
            outputs["q_proj"] *= 2
        self.projection = Linear(scope, scope.hidden_size, outputs, spec.qkv_bias)
        self.norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.qk_norm != "none":
            heads = (num_heads, num_kv_heads) if spec.qk_norm == "projection" else (1, 1)
            q_norm, k_norm = (RmsNorm(scope, f"{n}_norm", h * d, offset=spec.norm_offset) for n, h in zip("qk", heads, strict=True))
            self.norms = q_norm, k_norm
        self.sinks_N = scope.parameter("sinks", num_heads, dtype=torch.float32) if spec.sinks else None
        self.output = Linear(scope, num_heads * d, {"o_proj": scope.hidden_size}, spec.output_bias)

    def __call__(self, x_TD: Tensor, run: Pass) -> Tensor:
        """[T, D]; writes the tokens' keys and values."""
        spec, qkv_TX, gate_TX = self.spec, self.projection(x_TD), None
        if spec.gated:
            both_TX, kv_TX = torch.split(qkv_TX, [2 * self.sizes[0], 2 * self.sizes[1]], dim=1)
            q_TX, gate_TX = (part.reshape(len(x_TD), -1) for part in both_TX.reshape(len(x_TD), spec.num_heads, 2, -1).unbind(2))
            qkv_TX = torch.cat((q_TX, kv_TX), dim=1)
        q_THGd = self._place_heads(self._norm_projection(qkv_TX), run).view(len(x_TD), spec.num_kv_heads, -1, spec.head_dim)
        scale = spec.head_dim**-0.5
        out_TX = run.attend(q_THGd, run.kv.stores[self.store], scale, window=spec.window, sinks_N=self.sinks_N)
        return self.output(out_TX if gate_TX is None else self.arithmetic.sigmoid_times(gate_TX, out_TX))

    def _norm_projection(self, qkv_TX: Tensor) -> Tensor:
        if self.spec.qk_norm == "projection" and self.norms is not None:
            q_TX, k_TX, v_TX = torch.split(qkv_TX, self.sizes, dim=1)
            qkv_TX = torch.cat((self.norms[0](q_TX), self.norms[1](k_TX), v_TX), dim=1)
        limit = self.spec.clip_qkv
        return qkv_TX if limit is None else qkv_TX.clamp(-limit, limit)

    def _place_heads(self, qkv_TX: Tensor, run: Pass) -> Tensor:
        """Queries ready for attention; keys and values are written to the cache."""
        spec, store, rotary_T2R = self.spec, run.kv.stores[self.store], run.rotary(self.spec.rope, self.spec.rotary_dim)
        head_slots_N = run.head_slots(spec.num_kv_heads)
        norms = self.norms if spec.qk_norm == "head" else None
        if self.arithmetic.kernels is not None and spec.rotary_dim == spec.head_dim:
            gains = None if norms is None else (norms[0].gains_D, norms[1].gains_D)
            return self.arithmetic.kernels.place_heads(qkv_TX, gains, self.eps, rotary_T2R, head_slots_N, *store.rows())
        q_THd, k_THd, v_THd = (part.reshape(len(part), -1, spec.head_dim) for part in torch.split(qkv_TX, self.sizes, dim=1))
        if norms is not None:
            q_THd, k_THd = norms[0](q_THd), norms[1](k_THd)
        k_THd = self.arithmetic.rotate(k_THd, rotary_T2R)
        store.write(head_slots_N, k_THd[: run.num_tokens], v_THd[: run.num_tokens])
        return self.arithmetic.rotate(q_THd, rotary_T2R)
