"""The decoder that families configure. In: a packed batch and the KV cache. Out: logits and the router's choices. Never samples.

Shapes: T tokens, M wanted tokens, D model, K experts per token, L MoE layers, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.attention.backend import choose_attention
from batchgen.attention.reference import ReferenceAttention
from batchgen.kv_cache import KVCache
from batchgen.models.config import LayerConfig, ModelConfig
from batchgen.models.pass_context import Pass, RotaryTables
from batchgen.models.scope import Linear, RmsNorm, Scope
from batchgen.moe.expert_sum import ExpertSum
from batchgen.packing import PackedBatch
from batchgen.quant.packed import Packed
from batchgen.quant.read import Quantization
from batchgen.weights import Slot


@dataclass(slots=True, kw_only=True)
class ModelOutput:
    """What one forward pass gives."""

    logits_MV: Tensor
    """In the compute type, one row per `logit_index_M`."""
    routed_TLK: Tensor | None
    """int16 ids of each token's experts in each MoE layer, most likely first; None unless asked for."""


class DecoderLayer:
    """Pre-norm mixer, then pre-norm feed-forward layer."""

    def __init__(self, config: LayerConfig, scope: Scope, norm_offset: float, tables: RotaryTables, store: int, state: int):
        self.input_norm = RmsNorm(scope, "input_layernorm", scope.hidden_size, offset=norm_offset)
        self.mixer = config.mixer.build(scope, tables, store, state)
        self.post_norm = RmsNorm(scope, "post_attention_layernorm", scope.hidden_size, offset=norm_offset)
        self.feed_forward = config.feed_forward.build(scope)

    def forward(self, x_TD: Tensor, delta_TD: Tensor | ExpertSum, run: Pass) -> tuple[Tensor, Tensor | ExpertSum, Tensor | None]:
        """New residual stream, what is still to be added to it, and the router's choice in a MoE layer. `delta_TD` is what the layer before
        left to add: each norm takes in one such sum. Rows beyond the batch's tokens are padding."""
        x_TD, normed_TD = self.input_norm.add(x_TD, delta_TD)
        x_TD, normed_TD = self.post_norm.add(x_TD, self.mixer(normed_TD, run))
        shared_TD, delta_TD, ids_TK = self.feed_forward(normed_TD)
        return x_TD if shared_TD is None else x_TD + shared_TD, delta_TD, ids_TK


class Decoder:
    """Parameters are plain tensors whose storage never changes."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, quantization: Quantization | None = None):
        self.config = config
        self.arithmetic = arithmetic
        sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "rms_norm_eps": config.rms_norm_eps}
        root = Scope(arithmetic=arithmetic, quantization=quantization, **sizes)
        scope = root / config.prefix
        embedding = f"{config.prefix}.embed_tokens.weight"
        self.embedding_VD = root.parameter(embedding, config.vocab_size, config.hidden_size)
        self.attention = choose_attention(arithmetic, config.heads, config.plain)
        self.tables = RotaryTables(config.max_position_embeddings, arithmetic.device)
        self.layers: list[DecoderLayer] = []
        store = state = 0
        for index, layer in enumerate(config.layers):
            self.layers.append(DecoderLayer(layer, scope / f"layers.{index}", config.norm_offset, self.tables, store, state))
            store, state = store + len(layer.mixer.pages), state + len(layer.mixer.states)
        self.residuals = None if config.residuals is None else config.residuals.build(scope, config.num_layers)
        self.norm = RmsNorm(scope, "norm", config.hidden_size, offset=config.norm_offset)
        tied = (embedding, self.embedding_VD) if config.tie_word_embeddings else None
        self.head = Linear(root, config.hidden_size, {config.head: config.vocab_size}, tied=tied)
        self.slots: list[Slot] = root.slots
        """Every parameter under its Hugging Face name."""
        self.matrices = root.matrices
        """Right operands of all products."""

    @property
    def capturable(self) -> bool:
        """Whether a pass over decode rows asks nothing of the host: on a GPU, with kernels for attention and experts, and no packed
        weights, which plain torch computes with."""
        kernels = self.arithmetic.kernels
        if self.arithmetic.device.type != "cuda" or kernels is None or isinstance(self.attention, ReferenceAttention):
            return False
        return not any(isinstance(weight, Packed) for weight in self.matrices)

    def forward(self, batch: PackedBatch, kv: KVCache) -> ModelOutput:
        """One pass: writes the tokens' KV, returns logits of the wanted tokens."""
        hidden_TD, routed_TLK = self.hidden(batch, kv)
        return ModelOutput(logits_MV=self.logits(hidden_TD, batch.logit_index_M), routed_TLK=routed_TLK)

    @torch.inference_mode()
    def hidden(self, batch: PackedBatch, kv: KVCache) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the last norm (rows beyond the batch's tokens are padding) and, if asked for, routed_TLK."""
        num_tokens = batch.input_ids_T.numel()
        num_padding = self.arithmetic.pad_rows(num_tokens) - num_tokens
        x_TD = F.embedding(F.pad(batch.input_ids_T, (0, num_padding)), self.embedding_VD).to(self.arithmetic.compute_dtype)
        plan = self.attention.plan(batch, kv)
        run = Pass(batch=batch, kv=kv, attention=self.attention, plan=plan, tables=self.tables, num_padding=num_padding)
        hidden_TD, choices = self._run_layers(x_TD, run)
        routed = [ids_TK[:num_tokens].to(torch.int16) for ids_TK in choices] if batch.return_routed else []
        return hidden_TD, torch.stack(routed, dim=1) if routed else None

    def _run_layers(self, x_TD: Tensor, run: Pass) -> tuple[Tensor, list[Tensor]]:
        """Normed hidden states, and the router's choice of each MoE layer."""
        if self.residuals is not None:
            return self.residuals.run(self.layers, self.norm, x_TD, run)
        delta_TD: Tensor | ExpertSum = torch.zeros_like(x_TD)
        choices = []
        for layer in self.layers:
            x_TD, delta_TD, ids_TK = layer.forward(x_TD, delta_TD, run)
            if ids_TK is not None:
                choices.append(ids_TK)
        return self.norm.add(x_TD, delta_TD)[1], choices

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor, logit_index_M: Tensor) -> Tensor:
        """Logits of the wanted tokens in the compute type."""
        num_wanted = logit_index_M.numel()
        x_MD = hidden_TD[F.pad(logit_index_M, (0, self.arithmetic.pad_rows(num_wanted) - num_wanted))]
        return self.head(x_MD)[:num_wanted]
