"""The decoder that families configure. In: a packed batch and the KV cache. Out: logits and the router's choices. Never samples.

Shapes: T tokens, M wanted tokens, D model, H KV heads, G query heads per KV head, d head size, E experts, K experts per token,
L MoE layers, V vocabulary, P positions, X outputs of the fused q, k, v projection, F expert or feed-forward width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.arithmetic import Arithmetic
from batchgen.attention.backend import AttentionBackend, choose_attention
from batchgen.kv_cache import KVCache
from batchgen.models.blocks import DenseMLP, empty_weight
from batchgen.models.config import ModelConfig
from batchgen.models.names import Names
from batchgen.models.rotary import rotary_table
from batchgen.moe.expert_sum import ExpertSum
from batchgen.moe.experts import Experts
from batchgen.moe.router import route
from batchgen.packing import PackedBatch
from batchgen.weights import Slot


@dataclass(slots=True, kw_only=True)
class ModelOutput:
    """What one forward pass gives."""

    logits_MV: Tensor
    """In the compute type, one row per `logit_index_M`."""
    routed_TLK: Tensor | None
    """int16 ids of each token's experts in each MoE layer, most likely first; None unless asked for."""


class DecoderLayer:
    """Pre-norm attention, then pre-norm experts or a dense feed-forward layer."""

    def __init__(self, config: ModelConfig, index: int, arithmetic: Arithmetic, attention: AttentionBackend):
        self.config = config
        self.index = index
        self.arithmetic = arithmetic
        self.attention = attention
        d, hidden = config.head_dim, config.hidden_size
        self.qkv_sizes = [config.num_heads * d, config.num_kv_heads * d, config.num_kv_heads * d]
        num_outputs = sum(self.qkv_sizes)
        self.input_norm_D = empty_weight(arithmetic, hidden)
        self.qkv_XD = empty_weight(arithmetic, num_outputs, hidden)
        self.qkv_bias_X = empty_weight(arithmetic, num_outputs) if config.qkv_bias else None
        self.qk_norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm != "none":
            heads = (config.num_heads, config.num_kv_heads) if config.qk_norm == "projection" else (1, 1)
            self.qk_norms = empty_weight(arithmetic, heads[0] * d), empty_weight(arithmetic, heads[1] * d)
        self.o_DX = empty_weight(arithmetic, hidden, config.num_heads * d)
        self.o_bias_D = empty_weight(arithmetic, hidden) if config.output_bias else None
        self.post_norm_D = empty_weight(arithmetic, hidden)
        self.router_ED: Tensor | None = None
        self.shared: DenseMLP | None = None
        self.shared_gate_1D: Tensor | None = None
        self.mlp: Experts | DenseMLP
        if index in config.moe_layers:
            self.router_ED = empty_weight(arithmetic, config.num_experts, hidden)
            self.mlp = Experts(config.num_experts, hidden, config.moe_intermediate_size, arithmetic)
            if config.shared_expert_intermediate_size:
                self.shared = DenseMLP(hidden, config.shared_expert_intermediate_size, arithmetic)
                self.shared_gate_1D = empty_weight(arithmetic, 1, hidden)
        else:
            self.mlp = DenseMLP(hidden, config.intermediate_size, arithmetic, config.mlp_bias)

    def forward(
        self, x_TD: Tensor, delta_TD: Tensor | ExpertSum, rotary_T2d: Tensor, head_slots_N: Tensor, kv: KVCache, plan: Any
    ) -> tuple[Tensor, Tensor | ExpertSum, Tensor | None]:
        """New residual stream, what is still to be added to it, and the router's choice in a MoE layer. `delta_TD` is what the layer before
        left to add: each norm takes in one such sum. Rows beyond the batch's tokens are padding."""
        c, tokenwise = self.config, self.arithmetic.tokenwise
        x_TD, qkv_TX = tokenwise(self._project, x_TD, delta_TD)
        q_THd = self._place_heads(qkv_TX, rotary_T2d, head_slots_N, kv)
        attended_TX = self.attention.attend(q_THd.view(len(x_TD), c.num_kv_heads, -1, c.head_dim), kv, self.index, plan, c.head_dim**-0.5)
        if len(attended_TX) < len(x_TD):
            attended_TX = F.pad(attended_TX, (0, 0, 0, len(x_TD) - len(attended_TX)))
        if not isinstance(self.mlp, Experts):
            x_TD, delta_TD = tokenwise(self._dense, x_TD, attended_TX)
            return x_TD, delta_TD, None
        x_TD, normed_TD, ids_TK, weights_TK = tokenwise(self._route, x_TD, attended_TX)
        if self.shared is not None:
            x_TD = x_TD + tokenwise(self._share, normed_TD)[0]
        return x_TD, self.mlp(normed_TD, ids_TK, weights_TK), ids_TK

    def _project(self, x_TD: Tensor, delta_TD: Tensor | ExpertSum) -> tuple[Tensor, ...]:
        x_TD, normed_TD = self.arithmetic.add_norm(x_TD, delta_TD, self.input_norm_D, self.config.rms_norm_eps)
        return x_TD, self._norm_projection(self.arithmetic.linear(normed_TD, self.qkv_XD, self.qkv_bias_X))

    def _norm_projection(self, qkv_TX: Tensor) -> Tensor:
        c = self.config
        if c.qk_norm == "projection" and self.qk_norms is not None:
            q_TX, k_TX, v_TX = torch.split(qkv_TX, self.qkv_sizes, dim=1)
            q_TX, k_TX = (self.arithmetic.rms_norm(x, gains, c.rms_norm_eps) for x, gains in zip((q_TX, k_TX), self.qk_norms, strict=True))
            qkv_TX = torch.cat((q_TX, k_TX, v_TX), dim=1)
        return qkv_TX if c.clip_qkv is None else qkv_TX.clamp(-c.clip_qkv, c.clip_qkv)

    def _place_heads(self, qkv_TX: Tensor, rotary_T2d: Tensor, head_slots_N: Tensor, kv: KVCache) -> Tensor:
        """Queries ready for attention; keys and values are written to the cache."""
        norms, eps = self.qk_norms if self.config.qk_norm == "head" else None, self.config.rms_norm_eps
        if self.arithmetic.kernels is not None:
            return self.arithmetic.kernels.place_heads(qkv_TX, norms, eps, rotary_T2d, head_slots_N, *kv.rows(self.index))
        q_THd, k_THd, v_THd = self.arithmetic.tokenwise(self._heads, qkv_TX, rotary_T2d)
        num_tokens = head_slots_N.numel() // self.config.num_kv_heads
        kv.write(self.index, head_slots_N, k_THd[:num_tokens], v_THd[:num_tokens])
        return q_THd

    def _heads(self, qkv_TX: Tensor, rotary_T2d: Tensor) -> tuple[Tensor, ...]:
        c, arithmetic = self.config, self.arithmetic
        qkv_THd = qkv_TX.view(len(qkv_TX), -1, c.head_dim)
        q_THd, k_THd, v_THd = torch.split(qkv_THd, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if c.qk_norm == "head" and self.qk_norms is not None:
            q_THd, k_THd = (arithmetic.rms_norm(x, gains, c.rms_norm_eps) for x, gains in zip((q_THd, k_THd), self.qk_norms, strict=True))
        return arithmetic.apply_rotary(q_THd, rotary_T2d), arithmetic.apply_rotary(k_THd, rotary_T2d), v_THd

    def _attention_residual(self, x_TD: Tensor, attended_TX: Tensor) -> tuple[Tensor, Tensor]:
        attended_TD = self.arithmetic.linear(attended_TX, self.o_DX, self.o_bias_D)
        return self.arithmetic.add_norm(x_TD, attended_TD, self.post_norm_D, self.config.rms_norm_eps)

    def _dense(self, x_TD: Tensor, attended_TX: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(self.mlp, DenseMLP)
        x_TD, normed_TD = self._attention_residual(x_TD, attended_TX)
        return x_TD, self.mlp(normed_TD)

    def _route(self, x_TD: Tensor, attended_TX: Tensor) -> tuple[Tensor, ...]:
        assert self.router_ED is not None
        x_TD, normed_TD = self._attention_residual(x_TD, attended_TX)
        logits_TE = self.arithmetic.linear(normed_TD, self.router_ED)
        return x_TD, normed_TD, *route(self.arithmetic, logits_TE, self.config.num_experts_per_tok, self.config.norm_topk_prob)

    def _share(self, normed_TD: Tensor) -> tuple[Tensor]:
        """The shared expert's part, weighted by its gate."""
        assert self.shared is not None and self.shared_gate_1D is not None
        logits_T1 = self.arithmetic.linear(normed_TD, self.shared_gate_1D)
        # a softmax, which torch computes row by row: the last bits of an elementwise sigmoid depend on the place in the tensor
        gate_T1 = torch.cat((logits_T1, torch.zeros_like(logits_T1)), dim=1).softmax(1)[:, :1]
        return (self.shared(normed_TD) * gate_T1,)

    def matrices(self) -> list[Tensor]:
        """Right operands of this layer's products, one expert for all."""
        matrices = [self.qkv_XD, self.o_DX]
        if isinstance(self.mlp, DenseMLP):
            return [*matrices, self.mlp.gate_up_FD, self.mlp.down_DF]
        assert self.router_ED is not None
        if self.shared is not None and self.shared_gate_1D is not None:
            matrices += [self.shared.gate_up_FD, self.shared.down_DF, self.shared_gate_1D]
        return [*matrices, self.router_ED, self.mlp.gate_up_EFD[0], self.mlp.down_EDF[0]]

    def slots(self, names: Names) -> list[Slot]:
        """Hugging Face names of this layer's parameters."""
        layer = f"model.layers.{self.index}"
        slots = [
            Slot(f"{layer}.input_layernorm.weight", self.input_norm_D),
            Slot(f"{layer}.post_attention_layernorm.weight", self.post_norm_D),
            Slot(f"{layer}.self_attn.o_proj.weight", self.o_DX),
        ]
        if self.qk_norms is not None:
            slots += [Slot(f"{layer}.self_attn.{name}_norm.weight", gains) for name, gains in zip("qk", self.qk_norms, strict=True)]
        for name, part in zip("qkv", torch.split(self.qkv_XD, self.qkv_sizes), strict=True):
            slots.append(Slot(f"{layer}.self_attn.{name}_proj.weight", part))
        if self.qkv_bias_X is not None:
            for name, part in zip("qkv", torch.split(self.qkv_bias_X, self.qkv_sizes), strict=True):
                slots.append(Slot(f"{layer}.self_attn.{name}_proj.bias", part))
        if self.o_bias_D is not None:
            slots.append(Slot(f"{layer}.self_attn.o_proj.bias", self.o_bias_D))
        if isinstance(self.mlp, DenseMLP):
            return slots + _dense_slots(f"{layer}.mlp", self.mlp)
        if self.shared is not None and self.shared_gate_1D is not None:
            slots += _dense_slots(f"{layer}.mlp.shared_expert", self.shared)
            slots.append(Slot(f"{layer}.mlp.shared_expert_gate.weight", self.shared_gate_1D))
        return slots + self._expert_slots(layer, names, self.mlp)

    def _expert_slots(self, layer: str, names: Names, experts: Experts) -> list[Slot]:
        """Router and experts: one by one as checkpoints have them, and stacked as transformers holds them."""
        assert self.router_ED is not None
        router = Slot(f"{layer}.{names.moe}.gate.weight", self.router_ED)
        if names.moe != "mlp":
            router = Slot(f"{layer}.mlp.gate.weight", self.router_ED, covers=[router])
        gate_EFD, up_EFD = experts.gate_up_EFD.chunk(2, dim=1)
        prefix = f"{layer}.{names.moe}.experts"

        def one_by_one(parts: dict[str, Tensor]) -> list[Slot]:
            return [Slot(f"{prefix}.{e}.{name}.weight", part[e]) for e in range(experts.num_experts) for name, part in parts.items()]

        return [
            router,
            Slot(f"{layer}.mlp.experts.gate_up_proj", experts.gate_up_EFD, covers=one_by_one({names.gate: gate_EFD, names.up: up_EFD})),
            Slot(f"{layer}.mlp.experts.down_proj", experts.down_EDF, covers=one_by_one({names.down: experts.down_EDF})),
        ]


class Decoder:
    """Parameters are plain tensors whose storage never changes."""

    def __init__(self, config: ModelConfig, names: Names, arithmetic: Arithmetic):
        self.config = config
        self.names = names
        self.arithmetic = arithmetic
        self.embedding_VD = empty_weight(arithmetic, config.vocab_size, config.hidden_size)
        self.attention = choose_attention(arithmetic, config)
        self.layers = [DecoderLayer(config, index, arithmetic, self.attention) for index in range(config.num_layers)]
        self.norm_D = empty_weight(arithmetic, config.hidden_size)
        tied = config.tie_word_embeddings
        self.head_VD = self.embedding_VD if tied else empty_weight(arithmetic, config.vocab_size, config.hidden_size)
        self.rotary_P2d = rotary_table(config.max_position_embeddings, config.head_dim, config.rope, arithmetic.device)

    def forward(self, batch: PackedBatch, kv: KVCache) -> ModelOutput:
        """One pass: writes the tokens' KV, returns logits of the wanted tokens."""
        hidden_TD, routed_TLK = self.hidden(batch, kv)
        return ModelOutput(logits_MV=self.logits(hidden_TD, batch.logit_index_M), routed_TLK=routed_TLK)

    @torch.inference_mode()
    def hidden(self, batch: PackedBatch, kv: KVCache) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the last norm (rows beyond the batch's tokens are padding) and, if asked for, routed_TLK."""
        num_tokens = batch.input_ids_T.numel()
        padding = (0, self.arithmetic.pad_rows(num_tokens) - num_tokens)
        x_TD = F.embedding(F.pad(batch.input_ids_T, padding), self.embedding_VD).to(self.arithmetic.compute_dtype)
        rotary_T2d = self.rotary_P2d[F.pad(batch.positions_T, padding)]
        head_slots_N = kv.head_slots(batch.kv_slots_T)
        plan = self.attention.plan(batch, kv)
        delta_TD: Tensor | ExpertSum = torch.zeros_like(x_TD)
        routed = []
        for layer in self.layers:
            x_TD, delta_TD, ids_TK = layer.forward(x_TD, delta_TD, rotary_T2d, head_slots_N, kv, plan)
            if batch.return_routed and ids_TK is not None:
                routed.append(ids_TK[:num_tokens].to(torch.int16))
        hidden_TD = self.arithmetic.tokenwise(self._finish, x_TD, delta_TD)[0]
        return hidden_TD, torch.stack(routed, dim=1) if routed else None

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor, logit_index_M: Tensor) -> Tensor:
        """Logits of the wanted tokens in the compute type."""
        num_wanted = logit_index_M.numel()
        x_MD = hidden_TD[F.pad(logit_index_M, (0, self.arithmetic.pad_rows(num_wanted) - num_wanted))]
        return self.arithmetic.tokenwise(self._head, x_MD)[0][:num_wanted]

    def _finish(self, x_TD: Tensor, delta_TD: Tensor | ExpertSum) -> tuple[Tensor, ...]:
        return self.arithmetic.add_norm(x_TD, delta_TD, self.norm_D, self.config.rms_norm_eps)[1:]

    def _head(self, x_MD: Tensor) -> tuple[Tensor, ...]:
        return (self.arithmetic.linear(x_MD, self.head_VD),)

    def matrices(self) -> list[Tensor]:
        """Right operands of all products."""
        return [self.head_VD, *(matrix for layer in self.layers for matrix in layer.matrices())]

    def slots(self) -> list[Slot]:
        """Every parameter under its Hugging Face name."""
        head = Slot("lm_head.weight", self.head_VD, alias_of="model.embed_tokens.weight" if self.config.tie_word_embeddings else None)
        slots = [Slot("model.embed_tokens.weight", self.embedding_VD), Slot("model.norm.weight", self.norm_D), head]
        return slots + [slot for layer in self.layers for slot in layer.slots(self.names)]


def _dense_slots(prefix: str, mlp: DenseMLP) -> list[Slot]:
    gate_FD, up_FD = mlp.gate_up_FD.chunk(2)
    slots = [Slot(f"{prefix}.{n}_proj.weight", part) for n, part in (("gate", gate_FD), ("up", up_FD), ("down", mlp.down_DF))]
    if mlp.gate_up_bias_F is not None and mlp.down_bias_D is not None:
        gate_F, up_F = mlp.gate_up_bias_F.chunk(2)
        slots += [Slot(f"{prefix}.{n}_proj.bias", part) for n, part in (("gate", gate_F), ("up", up_F), ("down", mlp.down_bias_D))]
    return slots
