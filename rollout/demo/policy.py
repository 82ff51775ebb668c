"""A differentiable Qwen3-MoE decoder for trainers. In: token sequences, a checkpoint folder. Out: logits with gradients, a folder.

Parameter names are those of transformers 5 (experts stacked). The engine has its own code; this is what a user's trainer brings.
Shapes: T packed tokens, B sequences, L longest sequence, M positions whose logits are wanted, H query heads, G key/value heads,
C head size, D hidden size, E experts, K experts per token, N = T·K token copies, F expert hidden size, V vocabulary.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """The part of a Qwen3-MoE `config.json` that shapes the computation, under its names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    @classmethod
    def from_folder(cls, folder: str | Path) -> "PolicyConfig":
        """Read `config.json`; ValueError when it describes a model that this trainer cannot hold."""
        raw = json.loads((Path(folder) / "config.json").read_text())
        raw.setdefault("rope_theta", raw.get("rope_parameters", {}).get("rope_theta"))
        expected = {"model_type": "qwen3_moe", "tie_word_embeddings": True, "norm_topk_prob": True, "hidden_act": "silu"}
        for name, value in expected.items():
            if raw.get(name) != value:
                raise ValueError(f"{folder}/config.json has {name} = {raw.get(name)!r}; the demo's trainer only takes {value!r}")
        return cls(**{field.name: raw[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """A complete `config.json` for transformers and the engine."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **asdict(self),
            "intermediate_size": self.moe_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "router_aux_loss_coef": 0.001,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences laid end to end."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """Where each token sits in the padded [B, L] grid that attention uses."""
    num_rows: int
    row_length: int

    @classmethod
    def of(cls, sequences: list[list[int]], device: torch.device | str = "cpu") -> "Packed":
        row_length = max(map(len, sequences))
        ids = [token for sequence in sequences for token in sequence]
        positions_T = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        rows_T = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(sequence) for sequence in sequences]))
        slots_T = rows_T * row_length + positions_T
        return cls(torch.tensor(ids, device=device), positions_T.to(device), slots_T.to(device), len(sequences), row_length)


class Norm(nn.Module):
    """RMS norm over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class Linear(nn.Module):
    """A product with a master weight that is cast to the activations' type."""

    def __init__(self, in_size: int, out_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.heads, self.groups, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, self.groups * self.head_dim)
        self.v_proj = Linear(config.hidden_size, self.groups * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps)

    def forward(self, h_TD: Tensor, batch: Packed, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        q_THC = rotate(self.q_norm(self.q_proj(h_TD).unflatten(-1, (self.heads, -1))), cos_TC, sin_TC)
        k_TGC = rotate(self.k_norm(self.k_proj(h_TD).unflatten(-1, (self.groups, -1))), cos_TC, sin_TC)
        v_TGC = self.v_proj(h_TD).unflatten(-1, (self.groups, -1))

        def grid(x: Tensor) -> Tensor:
            padded = h_TD.new_zeros(batch.num_rows * batch.row_length, *x.shape[1:])
            padded = padded.index_copy(0, batch.slots_T, x.to(h_TD.dtype))
            return padded.view(batch.num_rows, batch.row_length, *x.shape[1:]).transpose(1, 2)

        repeat = self.heads // self.groups
        k_TGC, v_TGC = k_TGC.repeat_interleave(repeat, 1), v_TGC.repeat_interleave(repeat, 1)
        out_BHLC = F.scaled_dot_product_attention(grid(q_THC), grid(k_TGC), grid(v_TGC), is_causal=True)
        out_TD = out_BHLC.transpose(1, 2).flatten(0, 1).index_select(0, batch.slots_T).flatten(1)
        result_TD: Tensor = self.o_proj(out_TD)
        return result_TD


class Experts(nn.Module):
    """Gated experts as grouped products over tokens sorted by expert."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden, inner))

    def forward(self, h_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        num_experts, top_k = self.gate_up_proj.shape[0], experts_TK.shape[1]
        order_N = experts_TK.flatten().argsort(stable=True)
        tokens_N = order_N // top_k
        counts_E = F.one_hot(experts_TK, num_experts).sum((0, 1))
        ends_E = counts_E.cumsum(0).to(torch.int32)
        up_NF = F.grouped_mm(h_TD.index_select(0, tokens_N), self.gate_up_proj.to(h_TD.dtype).transpose(1, 2), offs=ends_E)
        gate_NF, value_NF = up_NF.chunk(2, -1)
        out_ND = F.grouped_mm(F.silu(gate_NF) * value_NF, self.down_proj.to(h_TD.dtype).transpose(1, 2), offs=ends_E)
        out_ND = out_ND * weights_TK.flatten().index_select(0, order_N).unsqueeze(-1).to(h_TD.dtype)
        return torch.zeros_like(h_TD).index_add(0, tokens_N, out_ND)


class SparseMLP(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = Experts(config)

    def forward(self, h_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = self.gate(h_TD).float().softmax(-1)
        weights_TK, experts_TK = scores_TE.topk(self.top_k, -1)
        return self.experts(h_TD, experts_TK, weights_TK / weights_TK.sum(-1, keepdim=True)), scores_TE


class Block(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMLP(config)

    def forward(self, x_TD: Tensor, batch: Packed, cos_TC: Tensor, sin_TC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD).to(dtype), batch, cos_TC, sin_TC)
        out_TD, scores_TE = self.mlp(self.post_attention_layernorm(x_TD).to(dtype))
        return x_TD + out_TD, scores_TE


class Trunk(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Policy(nn.Module):
    """The model. Master weights are float32; products run in `compute_dtype`, the residual stream stays float32."""

    def __init__(self, config: PolicyConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.model = Trunk(config)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Policy":
        """Load a checkpoint folder, strictly: missing and unexpected names raise RuntimeError."""
        policy = cls(PolicyConfig.from_folder(folder))
        tensors = load_file(str(Path(folder) / "model.safetensors"))
        policy.load_state_dict(stack_experts({name: tensor.float() for name, tensor in tensors.items()}))
        return policy

    def forward(self, batch: Packed, logit_index_M: Tensor) -> tuple[Tensor, list[Tensor]]:
        """float32 logits_MV after the tokens at `logit_index_M`, and every layer's router probabilities [T, E]."""
        x_TD = self.model.embed_tokens(batch.ids_T).float()
        cos_TC, sin_TC = rotary_tables(batch.positions_T, self.config.head_dim, self.config.rope_theta)
        router_scores = []
        for layer in self.model.layers:
            x_TD, scores_TE = layer(x_TD, batch, cos_TC, sin_TC, self.compute_dtype)
            router_scores.append(scores_TE)
        h_MD = self.model.norm(x_TD.index_select(0, logit_index_M)).to(self.compute_dtype)
        return F.linear(h_MD, self.model.embed_tokens.weight.to(self.compute_dtype)).float(), router_scores

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and a bfloat16 `model.safetensors` with one tensor per expert, as Hugging Face checkpoints have."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")
        tensors = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in split_experts(self.state_dict()).items()}
        save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})


def rotary_tables(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, C] of the rotary embedding, in float32."""
    frequencies_C = theta ** (-torch.arange(0, head_dim, 2, device=positions_T.device).float() / head_dim)
    angles_TC = (positions_T.float().unsqueeze(-1) * frequencies_C).repeat(1, 2)
    return angles_TC.cos(), angles_TC.sin()


def rotate(x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotary embedding, halves convention."""
    first, second = x_THC.chunk(2, -1)
    return x_THC * cos_TC.unsqueeze(1) + torch.cat((-second, first), -1) * sin_TC.unsqueeze(1)


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked expert tensors → one tensor per expert and projection."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for index, matrix in enumerate(tensor):
                result[f"{stem}.{index}.gate_proj.weight"], result[f"{stem}.{index}.up_proj.weight"] = matrix.chunk(2, 0)
        elif last == "down_proj":
            result |= {f"{stem}.{index}.down_proj.weight": matrix for index, matrix in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `split_experts`."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stems = dict.fromkeys(name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name)
    for stem in stems:
        count = sum(name.startswith(f"{stem}.") and name.endswith(".down_proj.weight") for name in tensors)
        parts = [{kind: tensors[f"{stem}.{i}.{kind}_proj.weight"] for kind in ("gate", "up", "down")} for i in range(count)]
        result[f"{stem}.gate_up_proj"] = torch.stack([torch.cat((part["gate"], part["up"])) for part in parts])
        result[f"{stem}.down_proj"] = torch.stack([part["down"] for part in parts])
    return result
