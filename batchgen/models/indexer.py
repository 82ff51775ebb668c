"""The indexer of sparse attention. In: normed activations, the queries' latent. Out: positions that a token sees. Never attends.

A small attention of its own scores all keys; a token then sees those with the highest scores (DeepSeek-V3.2, 2025).

Shapes: T tokens, D model, N heads of the indexer, d their size, R rotated dimensions, r size of the queries' latent, C chosen keys.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from batchgen.attention.choice import choose_keys, choose_pools
from batchgen.errors import ModelError
from batchgen.kv_cache import PageShape
from batchgen.models.pass_context import Pass
from batchgen.models.reader import ConfigReader
from batchgen.models.rotary import Rope
from batchgen.models.scope import Linear, Scope

NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """Scores are sums over heads of weight * relu(q . k), with queries and weights of their own and one key per token."""

    num_heads: int
    head_dim: int
    top_k: int
    """Keys that a token sees, at most."""
    rope: Rope | None
    rope_dim: int
    """First dimensions of queries and keys that are rotated."""
    interleaved: bool = False
    """Rotated pairs lie side by side in checkpoints; else half of them apart."""

    pool: int = 1
    """Consecutive keys that are scored and chosen together, as a mean weighted by gates; those of a pool that is not yet complete are
    always seen (GLM-5.3-Flash)."""

    def __post_init__(self) -> None:
        if self.top_k % self.pool:
            raise ModelError(f"config.json: index_topk is {self.top_k}, not a multiple of index_kpool, {self.pool}")
        if self.rope_dim > self.head_dim:
            raise ModelError(f"config.json: index_head_dim is {self.head_dim}, smaller than qk_rope_head_dim, {self.rope_dim}")

    @property
    def pages(self) -> tuple[PageShape, ...]:
        return (PageShape(1, self.head_dim, 0, shares_keys=True) if self.pool == 1 else PageShape(1, self.head_dim, self.head_dim),)


def read_indexer(reader: ConfigReader, rope: Rope | None, interleaved: bool, pool: int = 1) -> IndexerSpec:
    """As DeepSeek-V3.2 and GLM-5 name it."""
    return IndexerSpec(
        num_heads=reader.count("index_n_heads"),
        head_dim=reader.integer("index_head_dim"),
        top_k=reader.integer("index_topk"),
        rope=rope,
        rope_dim=reader.integer("qk_rope_head_dim", least=0),
        interleaved=interleaved,
        pool=pool,
    )


class Indexer:
    """Projections, and the choice."""

    def __init__(self, spec: IndexerSpec, scope: Scope, query_rank: int, store: int):
        self.spec, self.store, self.arithmetic = spec, store, scope.arithmetic
        self.queries = Linear(scope, query_rank, {"wq_b": spec.num_heads * spec.head_dim})
        self.keys = Linear(scope, scope.hidden_size, {"wk": spec.head_dim})
        self.norm_d, self.norm_bias_d = (scope.parameter(f"k_norm.{name}", spec.head_dim) for name in ("weight", "bias"))
        self.weights = Linear(scope, scope.hidden_size, {"weights_proj": spec.num_heads}, unpacked=True)
        self.gate = self.gate_bias_Pd = None
        if spec.pool > 1:
            self.gate = scope.parameter("index_kpool_compress_gate", spec.head_dim, scope.hidden_size)
            self.gate_bias_Pd = scope.parameter("index_kpool_compress_ape", spec.pool, spec.head_dim)

    def __call__(self, x_TD: Tensor, latent_Tr: Tensor, run: Pass) -> Tensor | None:
        """int64 [T, C] of the batch's tokens, ascending, then -1; None if all see everything. Writes the tokens' keys."""
        spec, store, num_tokens = self.spec, run.kv.stores[self.store], run.num_tokens
        (k_Td,) = self.arithmetic.tokenwise(self._normed, self.keys(x_TD))
        gates_T1d = None if self.gate is None else self.arithmetic.linear(x_TD, self.gate)[:num_tokens].unsqueeze(1)
        store.write(run.head_slots(1), self._rotate(k_Td.unsqueeze(1), run)[:num_tokens], gates_T1d)
        if run.longest <= spec.top_k:
            return None
        q_TNd = self._rotate(self.queries(latent_Tr).view(len(x_TD), spec.num_heads, -1), run)
        weights_TN = self.arithmetic.linear(x_TD, self.weights.weight_ND, wide=True) * (spec.num_heads * spec.head_dim) ** -0.5
        inputs = (self.arithmetic, q_TNd[:num_tokens], weights_TN[:num_tokens], store, run.batch, spec.top_k)
        return choose_keys(*inputs) if self.gate_bias_Pd is None else choose_pools(*inputs, self.gate_bias_Pd)

    def _normed(self, k_Td: Tensor) -> tuple[Tensor]:
        gains_d, bias_d = self.norm_d.to(k_Td.dtype), self.norm_bias_d.to(k_Td.dtype)
        return (F.layer_norm(k_Td, k_Td.shape[-1:], gains_d, bias_d, NORM_EPS),)

    def _rotate(self, x_THd: Tensor, run: Pass) -> Tensor:
        """Both a token's query heads and its key, alike."""
        if self.spec.rope is None:
            return x_THd
        rotary_T2R = run.rotary(self.spec.rope, self.spec.rope_dim)
        return self.arithmetic.rotate(x_THd, rotary_T2R, self.spec.interleaved)
