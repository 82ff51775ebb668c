"""Attention residuals in place of a residual stream (Kimi-K3). In: embeddings, layers. Out: normed hidden states. Never picks layers.

Layers add to a sum, which begins anew with every block of layers. What a layer reads is a mix of the finished blocks' sums and its own,
weighted by a softmax of each token's scores; the mix is read only, and never added to a sum.

Shapes: T tokens, D model, C candidates of a mix, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.models.config import Layer
from batchgen.models.pass_context import Pass
from batchgen.models.scope import RmsNorm, Scope
from batchgen.moe.expert_sum import ExpertSum


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionResiduals:
    """`block_size`: layers of a block."""

    block_size: int

    def build(self, scope: Scope, num_layers: int) -> "BlockSums":
        """`scope`: the decoder's."""
        return BlockSums(self.block_size, scope, num_layers)


class BlockSums:
    """The sums and the mixes that layers read."""

    def __init__(self, block_size: int, scope: Scope, num_layers: int):
        self.block_size = block_size
        layers = [scope / f"layers.{index}" for index in range(num_layers)]
        self.mixes = [(Mix(layer, "self_attention_res"), Mix(layer, "mlp_res")) for layer in layers]
        self.last_mix = Mix(scope, "output_attn_res")

    def run(self, layers: Sequence[Layer], norm: RmsNorm, x_TD: Tensor, run: Pass) -> tuple[Tensor, list[Tensor]]:
        """Normed hidden states, and the router's choice ids_TK of each MoE layer."""
        finished: list[Tensor] = []
        sum_TD: Tensor | None = x_TD
        choices = []
        for index, (layer, (before_mixer, before_feed_forward)) in enumerate(zip(layers, self.mixes, strict=True)):
            assert sum_TD is not None
            read_TD = before_mixer([*finished, sum_TD]) if finished else sum_TD
            if index % self.block_size == 0:
                finished.append(sum_TD)
                sum_TD = None
            out_TD = layer.mixer(layer.input_norm(read_TD), run)
            sum_TD = out_TD if sum_TD is None else sum_TD + out_TD
            read_TD = before_feed_forward([*finished, sum_TD])
            shared_TD, out, ids_TK = layer.feed_forward(layer.post_norm(read_TD))
            sum_TD = sum_TD + (out.total() if isinstance(out, ExpertSum) else out)
            sum_TD = sum_TD if shared_TD is None else sum_TD + shared_TD
            if ids_TK is not None:
                choices.append(ids_TK)
        assert sum_TD is not None
        return norm(self.last_mix([*finished, sum_TD])), choices


class Mix:
    """Candidates weighted by a softmax of scores: the product of a vector and the normed candidate."""

    def __init__(self, scope: Scope, name: str):
        self.arithmetic = scope.arithmetic
        self.norm = RmsNorm(scope, f"{name}_norm", scope.hidden_size)
        self.vector_1D = scope.parameter(f"{name}_proj.weight", 1, scope.hidden_size)

    def __call__(self, candidates: list[Tensor]) -> Tensor:
        """[T, D] of the candidates [T, D]."""
        stacked_TCD = torch.stack(candidates, dim=1)
        normed_ND = self.norm(stacked_TCD.view(-1, stacked_TCD.shape[2]))
        scores_TC = self.arithmetic.linear(normed_ND, self.vector_1D, wide=True).view(len(stacked_TCD), -1)
        weights_TC1 = scores_TC.float().softmax(dim=1).unsqueeze(2)
        return (weights_TC1 * stacked_TCD).sum(dim=1).to(stacked_TCD.dtype)
