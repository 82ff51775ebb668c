"""A real checkpoint that says one text: from each token of it the model goes to the next, whatever came before. Out: its folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_models import save_byte_tokenizer, tiny_moe

EOS, FIRST = 256, 257


def scripted_model(path: str | Path, script: Sequence[str], template: str, special: Sequence[str] = ()) -> Path:
    """`script`: pieces, all different, that become tokens of their own; after the last comes EOS. A prompt's last one says where it begins.

    `special`: those of them, and others, that are control tokens.
    """
    pieces = list(dict.fromkeys([*script, *special]))
    assert len(set(script)) == len(script)
    ids = {piece: FIRST + at for at, piece in enumerate(pieces)}
    size = FIRST + len(pieces)
    sizes = {"vocab_size": size, "hidden_size": size, "num_hidden_layers": 1, "max_position_embeddings": 4096}
    folder = tiny_moe(path, num_experts=2, num_experts_per_tok=1, **sizes)
    save_byte_tokenizer(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": ids[piece], "content": piece, "special": piece in special, **flags} for piece in pieces]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    _write_chain(folder, [*(ids[piece] for piece in script), EOS], size)
    return folder


def _write_chain(folder: Path, chain: list[int], size: int) -> None:
    """A token is its own hidden state: attention and experts add nothing, and the head looks only for the last token."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = torch.eye(size)
    tensors["model.norm.weight"] = torch.ones(size)
    head = torch.zeros(size, size)
    head[chain[1:], chain[:-1]] = 100.0
    tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
