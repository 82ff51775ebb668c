"""Layers that carry a state in place of keys and values. In: normed activations. Out: what the mixer adds. Never looks back at tokens.

The gated delta rule (`batchgen.attention.delta`) with a short convolution before it and a gated norm behind it: one decay per head in
Qwen3-Next's Gated DeltaNet, one per key dimension in Kimi Delta Attention (KDA).

Shapes: T tokens, D model, H key heads, N value heads, K key size, V value size, C = 2 H K + N V channels of the convolution, W taps.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.attention import delta
from batchgen.errors import ModelError
from batchgen.kv_cache import PageShape
from batchgen.models.pass_context import Pass, RotaryTables
from batchgen.models.scope import Linear, Scope

L2_EPS = 1e-6
"""Added to the sum of squares of a query or key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaSizes:
    """Heads and their sizes."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(
                f"config.json: {self.num_value_heads} value heads (linear_num_value_heads) are not a multiple of {self.num_key_heads} key "
                "heads (linear_num_key_heads)"
            )

    @property
    def channels(self) -> list[int]:
        """Of queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return [keys, keys, self.num_value_heads * self.value_dim]

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        """The convolution's last inputs, and the matrix of each value head."""
        return (sum(self.channels), self.num_taps - 1), (self.num_value_heads, self.key_dim, self.value_dim)


class DeltaRule:
    """From projected queries, keys and values to normed outputs."""

    def __init__(self, sizes: DeltaSizes, scope: Scope, norm: str, state: int):
        self.sizes, self.state, self.arithmetic, self.eps = sizes, state, scope.arithmetic, scope.rms_norm_eps
        self.taps_CW = scope.tensor(sum(sizes.channels), sizes.num_taps, dtype=torch.float32)
        self.gains_V = scope.parameter(f"{norm}.weight", sizes.value_dim, dtype=torch.float32)
        ones_K = torch.ones(sizes.key_dim, device=self.arithmetic.device)
        self._query_gains_K, self._key_gains_K = ones_K / sizes.key_dim, ones_K / sizes.key_dim**0.5

    def __call__(self, qkv_TC: Tensor, log_decay: Tensor, beta_TN: Tensor, run: Pass) -> Tensor:
        """[T, N, V] in the compute type; `log_decay` [T, N] or [T, N, K]. Moves the sequences' states on; padding gets zeros."""
        sizes, spans, count = self.sizes, run.spans(), run.num_tokens
        conv_states, states = run.kv.states[self.state : self.state + 2]
        qkv_TC, log_decay, beta_TN = qkv_TC[:count], log_decay[:count], beta_TN[:count]
        kernels = self.arithmetic.kernels
        convolve = delta.convolve if kernels is None else kernels.convolve
        q_TX, k_TX, v_TX = torch.split(convolve(qkv_TC, self.taps_CW, conv_states, spans), sizes.channels, dim=1)
        q_THK = self._unit(q_TX, self._query_gains_K)
        k_THK = self._unit(k_TX, self._key_gains_K)
        v_TNV = v_TX.view(count, sizes.num_value_heads, sizes.value_dim)
        if kernels is None:
            exact = self.arithmetic.deterministic
            out_TNV = delta.delta_rule(q_THK, k_THK, v_TNV, log_decay, beta_TN, states, spans, exact=exact)
        else:
            out_TNV = kernels.delta_rule(q_THK, k_THK, v_TNV, log_decay, beta_TN, states, spans)
        out_TNV = self.arithmetic.rms_norm(out_TNV, self.gains_V, self.eps).to(self.arithmetic.compute_dtype)
        return F.pad(out_TNV, (0, 0, 0, 0, 0, run.num_padding)) if run.num_padding else out_TNV

    def _unit(self, x_TX: Tensor, gains_K: Tensor) -> Tensor:
        """Heads of unit length, times K^1/2 and the gains: a root-mean-square norm."""
        x_THK = x_TX.view(len(x_TX), self.sizes.num_key_heads, self.sizes.key_dim)
        return self.arithmetic.rms_norm(x_THK, gains_K, L2_EPS / self.sizes.key_dim)


class Decay:
    """Logarithms of how much of a state remains."""

    def __init__(self, arithmetic: Arithmetic, rate_N: Tensor, bias_NK: Tensor, bound: float | None = None):
        self._kernels, self._rate_N, self._bias_NK, self._bound = arithmetic.cpu_kernels, rate_N, bias_NK, bound

    def __call__(self, x_TNK: Tensor) -> Tensor:
        """float32 [T, N, K], or [T, N, 1] where the bias is [N, 1]."""
        log_decay = delta.log_decay if self._kernels is None else self._kernels.log_decay
        return log_decay(x_TNK, self._rate_N, self._bias_NK, self._bound)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNet:
    """Gated DeltaNet (Yang et al. 2024) as Qwen3-Next has it."""

    sizes: DeltaSizes

    pages: ClassVar[tuple[PageShape, ...]] = ()
    heads: ClassVar[None] = None
    plain: ClassVar[bool] = False

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return self.sizes.states

    def build(self, scope: Scope, tables: RotaryTables, store: int, state: int) -> "GatedDeltaNetLayer":
        """The layer under `linear_attn`."""
        return GatedDeltaNetLayer(self.sizes, scope / "linear_attn", state)


class GatedDeltaNetLayer:
    """Checkpoints hold the projections key head by key head: its query, key, values and output gates."""

    def __init__(self, sizes: DeltaSizes, scope: Scope, state: int):
        self.sizes, self.arithmetic = sizes, scope.arithmetic
        queries, _, values = sizes.channels
        outputs = {"in_proj_qkvz": 2 * queries + 2 * values, "in_proj_ba": 2 * sizes.num_value_heads}
        self.projection = Linear(scope, scope.hidden_size, outputs)
        self.rule = DeltaRule(sizes, scope, "norm", state)
        scope.register("conv1d.weight", self.rule.taps_CW, shape=(sum(sizes.channels), 1, sizes.num_taps))
        rate_N = scope.parameter("A_log", sizes.num_value_heads, dtype=torch.float32)
        bias_N = scope.parameter("dt_bias", sizes.num_value_heads, dtype=torch.float32)
        self.decay = Decay(self.arithmetic, rate_N, bias_N.unsqueeze(1))
        self.output = Linear(scope, values, {"out_proj": scope.hidden_size})

    def __call__(self, x_TD: Tensor, run: Pass) -> Tensor:
        """[T, D]."""
        sizes, num_tokens = self.sizes, len(x_TD)
        both_TX, ba_TX = torch.split(self.projection(x_TD), self.projection.sizes, dim=1)
        per_head = sizes.num_value_heads // sizes.num_key_heads * sizes.value_dim
        widths = [sizes.key_dim, sizes.key_dim, per_head, per_head]
        parts_THX = torch.split(both_TX.reshape(num_tokens, sizes.num_key_heads, -1), widths, dim=2)
        q_TX, k_TX, v_TX, gate_TX = (part.reshape(num_tokens, -1) for part in parts_THX)
        b_TN, a_TN = (part.reshape(num_tokens, -1) for part in ba_TX.reshape(num_tokens, sizes.num_key_heads, 2, -1).unbind(2))
        log_decay_TN = self.decay(a_TN.unsqueeze(2)).squeeze(2)
        out_TNV = self.rule(torch.cat((q_TX, k_TX, v_TX), dim=1), log_decay_TN, self.arithmetic.sigmoid_times(b_TN), run)
        return self.output(self.arithmetic.sigmoid_times(gate_TX, out_TNV.reshape(num_tokens, -1), silu=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDelta:
    """Kimi Delta Attention (Kimi Linear, 2025)."""

    sizes: DeltaSizes
    bound: float | None = None
    """Least logarithm of a decay, approached by a sigmoid; None: unbounded, by a softplus."""
    wide_gate: bool = False
    """The output gate is one matrix (Kimi-K3); else a product of two with a head's width between."""
    num_rates: int = 0
    """Stored rates, of which the first `num_value_heads` count; 0: no more than those."""
    flat_rates: bool = False
    """Rates are stored as a vector, and else with dimensions of size 1 around."""

    pages: ClassVar[tuple[PageShape, ...]] = ()
    heads: ClassVar[None] = None
    plain: ClassVar[bool] = False

    @property
    def states(self) -> tuple[tuple[int, ...], ...]:
        return self.sizes.states

    def build(self, scope: Scope, tables: RotaryTables, store: int, state: int) -> "KimiDeltaLayer":
        """The layer under `self_attn`."""
        return KimiDeltaLayer(self, scope / "self_attn", state)


class KimiDeltaLayer:
    """Everything that reads the activations is one product."""

    def __init__(self, spec: KimiDelta, scope: Scope, state: int):
        self.spec, self.arithmetic = spec, scope.arithmetic
        sizes = spec.sizes
        self.num_channels, values = sum(sizes.channels), sizes.channels[2]
        qkv = {f"{name}_proj": size for name, size in zip("qkv", sizes.channels, strict=True)}
        gate = {"g_proj": values} if spec.wide_gate else {"g_a_proj": sizes.value_dim}
        outputs = qkv | {"b_proj": sizes.num_value_heads, "f_a_proj": sizes.key_dim} | gate
        self.projection = Linear(scope, scope.hidden_size, outputs)
        self.second_gate = None if spec.wide_gate else Linear(scope, sizes.value_dim, {"g_b_proj": values})
        self.decays = Linear(scope, sizes.key_dim, {"f_b_proj": sizes.num_value_heads * sizes.key_dim})
        self.rule = DeltaRule(sizes, scope, "o_norm", state)
        taps = zip("qkv", torch.split(self.rule.taps_CW.unsqueeze(1), sizes.channels), strict=True)
        parts = [scope.slot(f"{name}_conv1d.weight", part) for name, part in taps]
        scope.register("conv1d.weight", self.rule.taps_CW.unsqueeze(1), covers=parts)
        num_rates = spec.num_rates or sizes.num_value_heads
        shape = (num_rates,) if spec.flat_rates else (1, 1, num_rates, 1)
        rates = scope.parameter("A_log", *shape, dtype=torch.float32).view(-1)
        bias = scope.parameter("dt_bias", sizes.num_value_heads * sizes.key_dim, dtype=torch.float32)
        self.decay = Decay(self.arithmetic, rates[: sizes.num_value_heads], bias.view(-1, sizes.key_dim), spec.bound)
        for name in ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias"):
            scope.also(f"forget_gate.{name}", name)
        self.output = Linear(scope, values, {"o_proj": scope.hidden_size})

    def __call__(self, x_TD: Tensor, run: Pass) -> Tensor:
        """[T, D]."""
        sizes, num_tokens = self.spec.sizes, len(x_TD)
        widths = [self.num_channels, *self.projection.sizes[3:]]
        qkv_TC, b_TN, decay_TK, gate_TX = torch.split(self.projection(x_TD), widths, dim=1)
        decay_TNK = self.decays(decay_TK).view(num_tokens, -1, sizes.key_dim)
        out_TNV = self.rule(qkv_TC, self.decay(decay_TNK), self.arithmetic.sigmoid_times(b_TN), run)
        gate_TX = gate_TX if self.second_gate is None else self.second_gate(gate_TX)
        return self.output(self.arithmetic.sigmoid_times(gate_TX, out_TNV.reshape(num_tokens, -1)))
