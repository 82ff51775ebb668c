"""Kimi-K3's text model in plain torch: one sequence, float32, no cache, nothing fast. In: config.json's values, weights. Out: logits.

Written from the model's published facts, apart from the engine's implementation, to be what that one is compared with. T tokens,
D hidden, H heads, K head width, V vocabulary, E experts, R experts per token, L latent width, F expert width, W convolution width.

With fields left out (`attn_res_block_size`, `routed_expert_hidden_size`, `gate_lower_bound`, ...) it is Kimi-Linear, which is how it is
itself checked against transformers. Where the facts leave a choice:
- A norm that is not said to have eps 1e-6 has `rms_norm_eps`: the residual mixes' norms, `routed_expert_norm` and `o_norm` too.
- `self_attention_res_*` exist for layer 0 as for every layer, though nothing reads them: no block is complete there.
- `A_log` has 128 entries, zeros after the first H; a shape such as Kimi-Linear's [1, 1, H, 1] is read as well.
- `num_shared_experts` experts are one MLP of that many times the width, on the D-wide input, without a gate.
- The routed sum is normed only with `latent_moe_use_norm`; the scaling factor is in the weights, before the norm.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, pad, silu, softplus

PREFIX = "language_model."
KEPT_IN_FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
A_LOG_SIZE = 128
LATENT_NORM_EPS = 1e-6


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a small Kimi-K3; changes replace values of its text_config, and those of linear_attn_config by their name."""
    linear_attention = {
        "full_attn_layers": [4, 6, 7],
        "kda_layers": [1, 2, 3, 5],
        "gate_lower_bound": -5.0,
        "head_dim": 16,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "float32",
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 7,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 96,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.7,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 257,
        "eos_token_id": 256,
        "pad_token_id": 259,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    for name, value in changes.items():
        target = linear_attention if name in linear_attention else text
        if name not in target:
            raise ValueError(f"tiny_config has no {name}")
        target[name] = value
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "float32",
        "bos_token_id": 257,
        "eos_token_id": 256,
        "pad_token_id": 259,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 258,
        "tie_word_embeddings": False,
        "text_config": text | {"linear_attn_config": linear_attention},
        "vision_config": {"patch_size": 14, "vt_hidden_size": 16, "vt_num_hidden_layers": 1, "text_hidden_size": text["hidden_size"]},
    }


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model under its name in the checkpoint, and its shape."""
    text, shapes = config["text_config"], {}
    hidden = text["hidden_size"]
    for layer in range(text["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        if text["attn_res_block_size"] is not None:
            for place in ("self_attention_res", "mlp_res"):
                own |= {f"{place}_norm.weight": (hidden,), f"{place}_proj.weight": (1, hidden)}
        mixer = _delta_shapes(text) if layer + 1 in text["linear_attn_config"]["kda_layers"] else _latent_shapes(text)
        own |= {f"self_attn.{name}": shape for name, shape in mixer.items()}
        if layer < text["first_k_dense_replace"]:
            own |= _mlp_shapes("mlp", hidden, text["intermediate_size"])
        else:
            own |= {f"block_sparse_moe.{name}": shape for name, shape in _expert_shapes(text).items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (text["vocab_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    if text["attn_res_block_size"] is not None:
        shapes |= {"model.output_attn_res_norm.weight": (hidden,), "model.output_attn_res_proj.weight": (1, hidden)}
    return {PREFIX + name: shape for name, shape in shapes.items()}


def _delta_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, own = text["hidden_size"], text["linear_attn_config"]
    heads, head_dim = own["num_heads"], own["head_dim"]
    width = heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (width, hidden) for part in "qkv"}
    shapes |= {f"{part}_conv1d.weight": (width, 1, own["short_conv_kernel_size"]) for part in "qkv"}
    shapes |= {"f_a_proj.weight": (head_dim, hidden), "f_b_proj.weight": (width, head_dim), "dt_bias": (width,), "A_log": (A_LOG_SIZE,)}
    if own["use_full_rank_gate"]:
        shapes["g_proj.weight"] = (width, hidden)
    else:
        shapes |= {"g_a_proj.weight": (head_dim, hidden), "g_b_proj.weight": (width, head_dim)}
    return shapes | {"b_proj.weight": (heads, hidden), "o_norm.weight": (head_dim,), "o_proj.weight": (hidden, width)}


def _latent_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["q_lora_rank"]
    queries = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    out = heads * text["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (text["kv_lora_rank"] + text["qk_rope_head_dim"], hidden),
        "kv_a_layernorm.weight": (text["kv_lora_rank"],),
        "kv_b_proj.weight": (heads * (text["qk_nope_head_dim"] + text["v_head_dim"]), text["kv_lora_rank"]),
        "o_proj.weight": (hidden, out),
    }
    if rank is None:
        shapes["q_proj.weight"] = (queries, hidden)
    else:
        shapes |= {"q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (queries, rank)}
    if text["mla_use_output_gate"]:
        shapes["g_proj.weight"] = (out, hidden)
    return shapes


def _expert_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, latent, width = text["hidden_size"], text["routed_expert_hidden_size"], text["moe_intermediate_size"]
    inner = hidden if latent is None else latent
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (text["num_experts"], hidden),
        "gate.e_score_correction_bias": (text["num_experts"],),
    }
    for expert in range(text["num_experts"]):
        shapes |= {f"experts.{expert}.w1.weight": (width, inner), f"experts.{expert}.w3.weight": (width, inner)}
        shapes[f"experts.{expert}.w2.weight"] = (inner, width)
    if latent is not None:
        shapes |= {"routed_expert_down_proj.weight": (latent, hidden), "routed_expert_up_proj.weight": (hidden, latent)}
        if text["latent_moe_use_norm"]:
            shapes["routed_expert_norm.weight"] = (latent,)
    return shapes | _mlp_shapes("shared_experts", hidden, text["num_shared_experts"] * width)


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random float32 tensors under the checkpoint's names; those that ship in bfloat16 hold values that bfloat16 has."""
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(weight_shapes(config).items()):
        if name.endswith("A_log"):
            value = torch.zeros(shape)
            value[:heads] = torch.empty(heads).uniform_(0.3, 3.0, generator=generator).log()
        elif name.endswith("norm.weight"):
            value = torch.empty(shape).uniform_(0.5, 1.5, generator=generator)
        else:
            value = torch.randn(shape, generator=generator) * _spread(name, shape)
        weights[name] = value if name.endswith(KEPT_IN_FLOAT32) else value.bfloat16().float()
    return weights


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation that keeps every gate, mix and choice away from its constant parts."""
    if name.endswith("embed_tokens.weight"):
        return 1.0
    if name.endswith(("dt_bias", "conv1d.weight")):
        return 0.5
    if name.endswith("e_score_correction_bias"):
        return 0.2
    return shape[-1] ** -0.5  # more would amplify float32's rounding past 1e-4


def write_checkpoint(
    folder: str | Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    """config.json and model.safetensors, with a few vision tensors beside; what the release keeps in float32 stays in it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = str(dtype).removeprefix("torch.")
    values = dict(config) | {"dtype": named, "text_config": dict(config["text_config"]) | {"dtype": named}}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    vision = {"vision_tower.patch_embed.proj.weight": torch.zeros(16, 3, 14, 14), "mm_projector.proj.0.weight": torch.zeros(16, 16)}
    tensors = {name: tensor.to(torch.float32 if name.endswith(KEPT_IN_FLOAT32) else dtype) for name, tensor in (weights | vision).items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class Reference:
    """The text model over one sequence, in float32, or in float64 to tell whose rounding a difference is."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32):
        self.text = config["text_config"]
        self.delta = self.text["linear_attn_config"]
        self.weights = {name.removeprefix(PREFIX): tensor.to(dtype) for name, tensor in weights.items()}

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V]."""
        return self._run(token_ids)[0]

    def routed(self, token_ids: list[int]) -> Tensor:
        """[layers with experts, T, R]: the experts chosen, the most wanted first."""
        return torch.stack(self._run(token_ids)[1])

    def _run(self, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
        routed: list[Tensor] = []
        stream_TD = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        blocks: list[Tensor] = []
        size = self.text["attn_res_block_size"]
        for layer in range(self.text["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            mixed_TD = self._mix(stream_TD, blocks, f"{name}self_attention_res")
            begins = size is not None and layer % size == 0
            if begins:
                blocks = [*blocks, stream_TD]
            attended_TD = self._attention(layer, self._norm(mixed_TD, f"{name}input_layernorm"))
            stream_TD = attended_TD if begins else stream_TD + attended_TD
            mixed_TD = self._norm(self._mix(stream_TD, blocks, f"{name}mlp_res"), f"{name}post_attention_layernorm")
            if layer < self.text["first_k_dense_replace"]:
                stream_TD = stream_TD + self._mlp(mixed_TD, f"{name}mlp")
            else:
                out_TD, chosen_TR = self.moe(mixed_TD, f"{name}block_sparse_moe.")
                stream_TD = stream_TD + out_TD
                routed.append(chosen_TR)
        last_TD = self._norm(self._mix(stream_TD, blocks, "model.output_attn_res"), "model.norm")
        return linear(last_TD, self.weights["lm_head.weight"]), routed

    def _mix(self, stream_TD: Tensor, blocks: list[Tensor], name: str) -> Tensor:
        """The stream and the finished blocks, weighted by a softmax over what each scores under its norm; the stream alone without any."""
        if not blocks:
            return stream_TD
        candidates_CTD = torch.stack([*blocks, stream_TD])
        scores_CT = (self._norm(candidates_CTD, f"{name}_norm") * self.weights[f"{name}_proj.weight"][0]).sum(-1)
        return (scores_CT.softmax(0)[..., None] * candidates_CTD).sum(0)

    def _attention(self, layer: int, x_TD: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn."
        return self.kda(x_TD, name) if layer + 1 in self.delta["kda_layers"] else self.mla(x_TD, name)

    def kda(self, x_TD: Tensor, name: str) -> Tensor:
        """Delta attention with a decay per channel, token by token over a state of K keys by K values for each head."""
        w, heads, width = self.weights, self.delta["num_heads"], self.delta["head_dim"]
        shape = (len(x_TD), heads, width)
        q_THK, k_THK, v_THK = (
            self._short_convolution(linear(x_TD, w[f"{name}{part}_proj.weight"]), w[f"{name}{part}_conv1d.weight"]).view(shape)
            for part in "qkv"
        )
        q_THK = q_THK / (q_THK.square().sum(-1, keepdim=True) + 1e-6).sqrt() * width**-0.5
        k_THK = k_THK / (k_THK.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        decay_THK = self.log_decay(x_TD, name).exp()
        beta_TH = linear(x_TD, w[f"{name}b_proj.weight"]).sigmoid()
        state_HKV = torch.zeros(heads, width, width)
        outputs = []
        for q_HK, k_HK, v_HV, decay_HK, beta_H in zip(q_THK, k_THK, v_THK, decay_THK, beta_TH, strict=True):
            state_HKV = state_HKV * decay_HK[:, :, None]
            error_HV = v_HV - torch.einsum("hk,hkv->hv", k_HK, state_HKV)
            state_HKV = state_HKV + beta_H[:, None, None] * k_HK[:, :, None] * error_HV[:, None, :]
            outputs.append(torch.einsum("hk,hkv->hv", q_HK, state_HKV))
        out_THV = self._norm(torch.stack(outputs), f"{name}o_norm") * self._delta_gate(x_TD, name).view(shape).sigmoid()
        return linear(out_THV.flatten(1), w[f"{name}o_proj.weight"])

    def log_decay(self, x_TD: Tensor, name: str) -> Tensor:
        """[T, H, K], at or below 0: how much of each channel of the state each token leaves, as a logarithm."""
        w, heads = self.weights, self.delta["num_heads"]
        raw_TC = linear(linear(x_TD, w[f"{name}f_a_proj.weight"]), w[f"{name}f_b_proj.weight"]) + w[f"{name}dt_bias"]
        raw_THK = raw_TC.view(len(x_TD), heads, -1)
        rate_H1 = w[f"{name}A_log"].flatten()[:heads, None].exp()
        bound = self.delta["gate_lower_bound"]
        return -rate_H1 * softplus(raw_THK) if bound is None else bound * (rate_H1 * raw_THK).sigmoid()

    def _delta_gate(self, x_TD: Tensor, name: str) -> Tensor:
        if self.delta["use_full_rank_gate"]:
            return linear(x_TD, self.weights[f"{name}g_proj.weight"])
        return linear(linear(x_TD, self.weights[f"{name}g_a_proj.weight"]), self.weights[f"{name}g_b_proj.weight"])

    def _short_convolution(self, x_TC: Tensor, weight_C1W: Tensor) -> Tensor:
        """Each channel's last W values weighted, zeros before the first, then SiLU."""
        width = weight_C1W.shape[-1]
        padded = pad(x_TC, (0, 0, width - 1, 0))
        return silu(sum(weight_C1W[:, 0, tap] * padded[tap : tap + len(x_TC)] for tap in range(width)))

    def mla(self, x_TD: Tensor, name: str) -> Tensor:
        """Attention over latent keys and values without positions; the part that other models rotate is plain here."""
        w, text = self.weights, self.text
        heads, plain, shared = text["num_attention_heads"], text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        if text["q_lora_rank"] is None:
            queries = linear(x_TD, w[f"{name}q_proj.weight"])
        else:
            low = self._norm(linear(x_TD, w[f"{name}q_a_proj.weight"]), f"{name}q_a_layernorm", LATENT_NORM_EPS)
            queries = linear(low, w[f"{name}q_b_proj.weight"])
        q_THK = queries.view(len(x_TD), heads, plain + shared)
        latent, key_shared = linear(x_TD, w[f"{name}kv_a_proj_with_mqa.weight"]).split([text["kv_lora_rank"], shared], -1)
        expanded = linear(self._norm(latent, f"{name}kv_a_layernorm", LATENT_NORM_EPS), w[f"{name}kv_b_proj.weight"])
        key_plain, v_THV = expanded.view(len(x_TD), heads, -1).split([plain, text["v_head_dim"]], -1)
        k_THK = torch.cat([key_plain, key_shared[:, None].expand(-1, heads, -1)], -1)
        scores_HTT = torch.einsum("thk,shk->hts", q_THK, k_THK) * (plain + shared) ** -0.5
        later = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
        out_TC = torch.einsum("hts,shv->thv", scores_HTT.masked_fill(later, -torch.inf).softmax(-1), v_THV).flatten(1)
        if text["mla_use_output_gate"]:
            out_TC = out_TC * linear(x_TD, w[f"{name}g_proj.weight"]).sigmoid()
        return linear(out_TC, w[f"{name}o_proj.weight"])

    def moe(self, x_TD: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Routed experts inside the latent plus the shared one outside, and [T, R] what was chosen."""
        w, text = self.weights, self.text
        score_TE = linear(x_TD, w[f"{name}gate.weight"]).sigmoid()
        chosen_TR = (score_TE + w[f"{name}gate.e_score_correction_bias"]).topk(text["num_experts_per_token"]).indices
        weight_TR = score_TE.gather(1, chosen_TR)
        if text["moe_renormalize"]:
            weight_TR = weight_TR / (weight_TR.sum(-1, keepdim=True) + 1e-20)
        weight_TR = weight_TR * text["routed_scaling_factor"]
        has_latent = text["routed_expert_hidden_size"] is not None
        inner_TL = linear(x_TD, w[f"{name}routed_expert_down_proj.weight"]) if has_latent else x_TD
        sum_TL = torch.zeros_like(inner_TL)
        for token, (chosen, weights) in enumerate(zip(chosen_TR.tolist(), weight_TR, strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                gate, up, down = (w[f"{name}experts.{expert}.{part}.weight"] for part in ("w1", "w3", "w2"))
                sum_TL[token] += weight * linear(self.act(linear(inner_TL[token], gate), linear(inner_TL[token], up)), down)
        if has_latent:
            if text["latent_moe_use_norm"]:
                sum_TL = self._norm(sum_TL, f"{name}routed_expert_norm")
            sum_TL = linear(sum_TL, w[f"{name}routed_expert_up_proj.weight"])
        return sum_TL + self._mlp(x_TD, f"{name}shared_experts"), chosen_TR

    def _mlp(self, x_TD: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return linear(self.act(linear(x_TD, gate), linear(x_TD, up)), down)

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiTU: both halves bounded softly, the gate by beta and the other by the linear beta; or the usual SwiGLU."""
        if self.text["hidden_act"] == "silu":
            return silu(gate) * up
        beta, linear_beta = self.text["activation_situ_beta"], self.text["activation_situ_linear_beta"]
        return beta * (gate / beta).tanh() * gate.sigmoid() * linear_beta * (up / linear_beta).tanh()

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.text["rms_norm_eps"] if eps is None else eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weights[f"{name}.weight"]
