"""Qwen3-MoE decoder. In: a packed batch and the KV cache. Out: logits and the router's choices. Never samples.

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
from batchgen.models.blocks import DenseMLP, empty_weight, rotary_table
from batchgen.models.config import ConfigReader, ModelConfig
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
        num_outputs = (config.num_heads + 2 * config.num_kv_heads) * d
        self.input_norm_D = empty_weight(arithmetic, hidden)
        self.qkv_XD = empty_weight(arithmetic, num_outputs, hidden)
        self.qkv_bias_X = empty_weight(arithmetic, num_outputs) if config.attention_bias else None
        self.q_norm_d = empty_weight(arithmetic, d)
        self.k_norm_d = empty_weight(arithmetic, d)
        self.o_DX = empty_weight(arithmetic, hidden, config.num_heads * d)
        self.o_bias_D = empty_weight(arithmetic, hidden) if config.attention_bias else None
        self.post_norm_D = empty_weight(arithmetic, hidden)
        self.router_ED: Tensor | None = None
        self.mlp: Experts | DenseMLP
        if index in config.moe_layers:
            self.router_ED = empty_weight(arithmetic, config.num_experts, hidden)
            self.mlp = Experts(config.num_experts, hidden, config.moe_intermediate_size, arithmetic)
        else:
            self.mlp = DenseMLP(hidden, config.intermediate_size, arithmetic)

    def forward(
        self, x_TD: Tensor, delta_TD: Tensor, rotary_T2d: Tensor, head_slots_N: Tensor, kv: KVCache, plan: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
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
        return x_TD, self.mlp(normed_TD, ids_TK, weights_TK), ids_TK

    def _project(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, ...]:
        x_TD, normed_TD = self.arithmetic.add_norm(x_TD, delta_TD, self.input_norm_D, self.config.rms_norm_eps)
        return x_TD, self.arithmetic.linear(normed_TD, self.qkv_XD, self.qkv_bias_X)

    def _place_heads(self, qkv_TX: Tensor, rotary_T2d: Tensor, head_slots_N: Tensor, kv: KVCache) -> Tensor:
        """Queries ready for attention; keys and values are written to the cache."""
        norms, eps = (self.q_norm_d, self.k_norm_d), self.config.rms_norm_eps
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
        q_THd = arithmetic.apply_rotary(arithmetic.rms_norm(q_THd, self.q_norm_d, c.rms_norm_eps), rotary_T2d)
        k_THd = arithmetic.apply_rotary(arithmetic.rms_norm(k_THd, self.k_norm_d, c.rms_norm_eps), rotary_T2d)
        return q_THd, k_THd, v_THd

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

    def matrices(self) -> list[Tensor]:
        """Right operands of this layer's products, one expert for all."""
        matrices = [self.qkv_XD, self.o_DX]
        if isinstance(self.mlp, DenseMLP):
            return [*matrices, self.mlp.gate_up_FD, self.mlp.down_DF]
        assert self.router_ED is not None
        return [*matrices, self.router_ED, self.mlp.gate_up_EFD[0], self.mlp.down_EDF[0]]

    def slots(self) -> list[Slot]:
        """Hugging Face names of this layer's parameters."""
        c, layer = self.config, f"model.layers.{self.index}"
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        slots = [
            Slot(f"{layer}.input_layernorm.weight", self.input_norm_D),
            Slot(f"{layer}.post_attention_layernorm.weight", self.post_norm_D),
            Slot(f"{layer}.self_attn.q_norm.weight", self.q_norm_d),
            Slot(f"{layer}.self_attn.k_norm.weight", self.k_norm_d),
            Slot(f"{layer}.self_attn.o_proj.weight", self.o_DX),
        ]
        for name, part in zip("qkv", torch.split(self.qkv_XD, sizes), strict=True):
            slots.append(Slot(f"{layer}.self_attn.{name}_proj.weight", part))
        if self.qkv_bias_X is not None and self.o_bias_D is not None:
            slots.append(Slot(f"{layer}.self_attn.o_proj.bias", self.o_bias_D))
            for name, part in zip("qkv", torch.split(self.qkv_bias_X, sizes), strict=True):
                slots.append(Slot(f"{layer}.self_attn.{name}_proj.bias", part))
        if isinstance(self.mlp, DenseMLP):
            gate_FD, up_FD = self.mlp.gate_up_FD.chunk(2)
            parts = (("gate_proj", gate_FD), ("up_proj", up_FD), ("down_proj", self.mlp.down_DF))
            return slots + [Slot(f"{layer}.mlp.{name}.weight", part) for name, part in parts]
        assert self.router_ED is not None
        slots.append(Slot(f"{layer}.mlp.gate.weight", self.router_ED))
        experts = f"{layer}.mlp.experts"
        slots.append(Slot(f"{experts}.gate_up_proj", self.mlp.gate_up_EFD, covers=_expert_slots(experts, self.mlp, ("gate", "up"))))
        slots.append(Slot(f"{experts}.down_proj", self.mlp.down_EDF, covers=_expert_slots(experts, self.mlp, ("down",))))
        return slots


class Qwen3Moe:
    """The decoder. Parameters are plain tensors whose storage never changes."""

    architecture = "Qwen3MoeForCausalLM"

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic):
        self.config = config
        self.arithmetic = arithmetic
        self.embedding_VD = empty_weight(arithmetic, config.vocab_size, config.hidden_size)
        self.attention = choose_attention(arithmetic, config)
        self.layers = [DecoderLayer(config, index, arithmetic, self.attention) for index in range(config.num_layers)]
        self.norm_D = empty_weight(arithmetic, config.hidden_size)
        tied = config.tie_word_embeddings
        self.head_VD = self.embedding_VD if tied else empty_weight(arithmetic, config.vocab_size, config.hidden_size)
        self.rotary_P2d = rotary_table(config.max_position_embeddings, config.head_dim, config.rope_theta, arithmetic.device)

    def forward(self, batch: PackedBatch, kv: KVCache) -> ModelOutput:
        """One pass: writes the tokens' KV, returns logits of the wanted tokens."""
        hidden_TD, routed_TLK = self.hidden(batch, kv)
        return ModelOutput(logits_MV=self.logits(hidden_TD, batch.logit_index_M), routed_TLK=routed_TLK)

    @torch.inference_mode()
    def hidden(self, batch: PackedBatch, kv: KVCache) -> tuple[Tensor, Tensor | None]:
        """Hidden states after the last layer (rows beyond the batch's tokens are padding) and, if asked for, routed_TLK."""
        num_tokens = batch.input_ids_T.numel()
        padding = (0, self.arithmetic.pad_rows(num_tokens) - num_tokens)
        x_TD = F.embedding(F.pad(batch.input_ids_T, padding), self.embedding_VD).to(self.arithmetic.compute_dtype)
        rotary_T2d = self.rotary_P2d[F.pad(batch.positions_T, padding)]
        head_slots_N = kv.head_slots(batch.kv_slots_T)
        plan = self.attention.plan(batch, kv)
        delta_TD, routed = torch.zeros_like(x_TD), []
        for layer in self.layers:
            x_TD, delta_TD, ids_TK = layer.forward(x_TD, delta_TD, rotary_T2d, head_slots_N, kv, plan)
            if batch.return_routed and ids_TK is not None:
                routed.append(ids_TK[:num_tokens].to(torch.int16))
        return x_TD + delta_TD, torch.stack(routed, dim=1) if routed else None

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor, logit_index_M: Tensor) -> Tensor:
        """Logits of the wanted tokens in the compute type."""
        num_wanted = logit_index_M.numel()
        x_MD = hidden_TD[F.pad(logit_index_M, (0, self.arithmetic.pad_rows(num_wanted) - num_wanted))]
        return self.arithmetic.tokenwise(self._head, x_MD)[0][:num_wanted]

    def _head(self, x_MD: Tensor) -> tuple[Tensor, ...]:
        normed_MD = self.arithmetic.rms_norm(x_MD, self.norm_D, self.config.rms_norm_eps)
        return (self.arithmetic.linear(normed_MD, self.head_VD),)

    def matrices(self) -> list[Tensor]:
        """Right operands of all products."""
        return [self.head_VD, *(matrix for layer in self.layers for matrix in layer.matrices())]

    def slots(self) -> list[Slot]:
        """Every parameter under its Hugging Face name."""
        head = Slot("lm_head.weight", self.head_VD, alias_of="model.embed_tokens.weight" if self.config.tie_word_embeddings else None)
        slots = [Slot("model.embed_tokens.weight", self.embedding_VD), Slot("model.norm.weight", self.norm_D), head]
        return slots + [slot for layer in self.layers for slot in layer.slots()]


def read_config(values: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    """ModelConfig of a Qwen3-MoE config.json and generation_config.json."""
    reader = ConfigReader(values)
    reader.refuse("hidden_act", ("silu",))
    reader.refuse("use_sliding_window", (False,))
    rope = reader.get("rope_parameters", "rope_scaling", default={})
    ConfigReader(rope).refuse("rope_type", ("default",))
    num_layers, num_heads, hidden = (reader.get(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    step, dense = reader.get("decoder_sparse_step", default=1), reader.get("mlp_only_layers", default=[])
    num_experts = reader.get("num_experts", "num_local_experts", default=0)
    moe_layers = tuple(i for i in range(num_layers) if num_experts and i not in dense and (i + 1) % step == 0)
    eos = ConfigReader(generation).get("eos_token_id", default=reader.get("eos_token_id", default=[]))
    return ModelConfig(
        architecture=Qwen3Moe.architecture,
        vocab_size=reader.get("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.get("num_key_value_heads", default=num_heads),
        head_dim=reader.get("head_dim", default=hidden // num_heads),
        rms_norm_eps=reader.get("rms_norm_eps", default=1e-6),
        rope_theta=float(rope.get("rope_theta") or reader.get("rope_theta", default=10000.0)),
        max_position_embeddings=reader.get("max_position_embeddings"),
        tie_word_embeddings=reader.get("tie_word_embeddings", default=False),
        attention_bias=reader.get("attention_bias", default=False),
        intermediate_size=reader.get("intermediate_size", default=0),
        moe_intermediate_size=reader.get("moe_intermediate_size", default=0),
        num_experts=num_experts,
        num_experts_per_tok=reader.get("num_experts_per_tok", default=0),
        norm_topk_prob=reader.get("norm_topk_prob", default=False),
        moe_layers=moe_layers,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=str(reader.get("dtype", "torch_dtype", default="float32")),
    )


def _expert_slots(prefix: str, experts: Experts, parts: tuple[str, ...]) -> list[Slot]:
    """One slot per expert and projection, inside the stacked tensors. The checkpoint has one tensor each."""
    gate_EFD, up_EFD = experts.gate_up_EFD.chunk(2, dim=1)
    stacked = {"gate": gate_EFD, "up": up_EFD, "down": experts.down_EDF}
    return [Slot(f"{prefix}.{expert}.{part}_proj.weight", stacked[part][expert]) for expert in range(experts.num_experts) for part in parts]
