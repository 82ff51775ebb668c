"""Hyper-connections in place of a residual stream (GLM-5.3-Flash). In: embeddings, layers. Out: normed hidden states. Never picks layers.

There are several streams. A mixer or feed-forward layer reads a weighted sum of them; its output is added to each with a weight of its
own, and the streams are mixed by a matrix whose rows and columns sum to 1. Each token's weights come from its streams (mHC, Xie et al.
2026).

Shapes: T tokens, S streams, D model, K experts per token.
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
class HyperConnections:
    """Streams, and how their mixes are balanced."""

    num_streams: int
    num_iterations: int
    """Of the Sinkhorn-Knopp algorithm."""
    eps: float

    def build(self, scope: Scope, num_layers: int) -> "Streams":
        """`scope`: the decoder's."""
        return Streams(self, scope, num_layers)


class Streams:
    """The streams of a pass, and what connects them with each layer."""

    def __init__(self, spec: HyperConnections, scope: Scope, num_layers: int):
        self.num_streams = spec.num_streams
        layers = [scope / f"layers.{index}" for index in range(num_layers)]
        self.connections = [(Connection(spec, layer, "attn"), Connection(spec, layer, "ffn")) for layer in layers]

    def run(self, layers: Sequence[Layer], norm: RmsNorm, x_TD: Tensor, run: Pass) -> tuple[Tensor, list[Tensor]]:
        """Normed hidden states, and the router's choice ids_TK of each MoE layer."""
        streams_TSD = x_TD.unsqueeze(1).repeat(1, self.num_streams, 1)
        choices = []
        for layer, (to_mixer, to_feed_forward) in zip(layers, self.connections, strict=True):
            read_TD, weights = to_mixer(streams_TSD)
            streams_TSD = weights.add(streams_TSD, layer.mixer(layer.input_norm(read_TD), run))
            read_TD, weights = to_feed_forward(streams_TSD)
            shared_TD, out, ids_TK = layer.feed_forward(layer.post_norm(read_TD))
            out_TD = out.total() if isinstance(out, ExpertSum) else out
            streams_TSD = weights.add(streams_TSD, out_TD if shared_TD is None else out_TD + shared_TD)
            if ids_TK is not None:
                choices.append(ids_TK)
        return norm(streams_TSD.mean(dim=1)), choices


@dataclass(slots=True)
class Weights:
    """How streams take in an output."""

    output_TS1: Tensor
    mix_TSS1: Tensor
    """From stream, to stream."""

    def add(self, streams_TSD: Tensor, out_TD: Tensor) -> Tensor:
        """The streams' next values."""
        mixed_TSD = self.output_TS1 * out_TD.unsqueeze(1)
        for source, stream_TD in enumerate(streams_TSD.unbind(1)):
            mixed_TSD = mixed_TSD + self.mix_TSS1[:, source] * stream_TD.unsqueeze(1)
        return mixed_TSD


class Connection:
    """From a token's streams to what a layer reads of them, and to the weights of what it writes."""

    def __init__(self, spec: HyperConnections, scope: Scope, name: str):
        self.spec, self.arithmetic, self.eps = spec, scope.arithmetic, scope.rms_norm_eps
        count, width = spec.num_streams, spec.num_streams * scope.hidden_size
        self.sizes = [count, count, count * count]
        self.matrix_XD = scope.parameter(f"hc_{name}_fn", sum(self.sizes), width)
        self.bias_X = scope.parameter(f"hc_{name}_base", sum(self.sizes), dtype=torch.float32)
        self.scale_3 = scope.parameter(f"hc_{name}_scale", 3, dtype=torch.float32)
        for part in ("fn", "base", "scale"):
            scope.also(f"{name}_hc.{part}", f"hc_{name}_{part}")
        scale_of_X = torch.arange(3).repeat_interleave(torch.tensor(self.sizes))
        self._scale_of_X = scale_of_X.to(self.arithmetic.device)
        self._ones_D = torch.ones(width, device=self.arithmetic.device)

    def __call__(self, streams_TSD: Tensor) -> tuple[Tensor, Weights]:
        """[T, D], and the weights."""
        normed_TX = self.arithmetic.rms_norm(streams_TSD.flatten(1), self._ones_D, self.eps)
        values_TX = self.arithmetic.linear(normed_TX, self.matrix_XD, wide=True).float()
        scale_X = self.scale_3[self._scale_of_X]
        read_TS, output_TS, mix_TX = torch.split(values_TX * scale_X + self.bias_X, self.sizes, dim=1)
        read_TS1 = (self._sigmoid(read_TS) + self.spec.eps).unsqueeze(2).to(streams_TSD.dtype)
        read_TD = (read_TS1 * streams_TSD).sum(dim=1)
        mix_TSS = self._balanced(mix_TX.view(len(mix_TX), self.spec.num_streams, -1))
        output_TS1 = 2 * self._sigmoid(output_TS).unsqueeze(2)
        return read_TD, Weights(output_TS1.to(streams_TSD.dtype), mix_TSS.unsqueeze(3).to(streams_TSD.dtype))

    @staticmethod
    def _sigmoid(x_TS: Tensor) -> Tensor:
        """As a softmax, which torch computes row by row: the last bits of an elementwise sigmoid depend on the place in the tensor."""
        return torch.stack((x_TS, torch.zeros_like(x_TS)), dim=2).softmax(2)[..., 0]

    def _balanced(self, mix_TSS: Tensor) -> Tensor:
        """Positive, rows and columns summing to 1."""
        eps = self.spec.eps
        mix_TSS = mix_TSS.softmax(dim=2) + eps
        mix_TSS = mix_TSS / (mix_TSS.sum(dim=1, keepdim=True) + eps)
        for _ in range(self.spec.num_iterations - 1):
            mix_TSS = mix_TSS / (mix_TSS.sum(dim=2, keepdim=True) + eps)
            mix_TSS = mix_TSS / (mix_TSS.sum(dim=1, keepdim=True) + eps)
        return mix_TSS
