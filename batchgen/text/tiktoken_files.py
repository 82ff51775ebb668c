"""Tokenizer files as Kimi ships them. In: a folder with tiktoken.model and tokenizer_config.json. Out: the same as a tokenizer.json.

tiktoken.model is a line per token: its bytes in base64 and its rank, which is its id. Two things are in neither file, only in the Python
that comes with them and is never run here: the pattern that cuts a text before merging, and that the 256 ids after the ranks are the
added tokens, `<|reserved_token_ID|>` where tokenizer_config.json names none.
"""

import base64
import binascii
from pathlib import Path
from typing import Any

from batchgen.errors import ModelError
from batchgen.text.pieces import BYTE_CHARS

FILE = "tiktoken.model"
NUM_ADDED = 256
"""Ids behind the ranks that belong to added tokens, named or reserved."""

_MARKED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_MARKED}*{_SMALL}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_MARKED}+{_SMALL}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How every Kimi tokenizer cuts a text: runs of Han, words that start a new one at a capital after small letters, up to three digits,
punctuation, white space that leaves its last character to what follows."""


def tiktoken_spec(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The folder's ranks and added tokens in the form of a tokenizer.json; None without tiktoken.model.

    Raises ModelError naming file and line (or entry) for what is wrong, and for a tokenizer class whose pattern is not known.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class is {config.get('tokenizer_class')!r:.100}, and {FILE} does not say how "
            "text is cut; known: 'TikTokenTokenizer' (Kimi). For others convert the tokenizer to tokenizer.json"
        )
    ranks = _read_ranks(path)
    names = {token: "".join([BYTE_CHARS[byte] for byte in token]) for token in ranks}
    # Every way to make a token of two others, in order of its rank: byte pair encoding only ever meets one of them.
    merges = [
        [names[token[:at]], names[token[at:]]]
        for token in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    cut = {"type": "Split", "pattern": {"Regex": KIMI_PATTERN}, "behavior": "Isolated", "invert": False}
    spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(folder / "tokenizer_config.json", config, len(ranks)),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, spell]},
        "decoder": spell,
        "model": {
            "type": "BPE",
            "vocab": {names[token]: rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": True,  # a piece that is a token is that token, however it would merge
        },
    }


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes → rank. Ranks are 0, 1, 2, ... in any order, and every single byte has one."""
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        where = f"{path}, line {number}"
        if len(parts) != 2 or not parts[1].isdigit():
            raise ModelError(f"{where}: expected a token in base64 and its rank, got {line.decode(errors='replace')!r:.100}")
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except binascii.Error as error:
            raise ModelError(f"{where}: {parts[0].decode(errors='replace')!r:.100} is not base64: {error}") from None
        if rank in line_of:
            raise ModelError(f"{where}: rank {rank} is already that of line {line_of[rank]}")
        if token in ranks:
            raise ModelError(f"{where}: the token {token!r:.100} is already on line {line_of[ranks[token]]}")
        ranks[token] = rank
        line_of[rank] = number
    absent = next((rank for rank in range(len(ranks)) if rank not in line_of), None)
    if absent is not None:
        raise ModelError(f"{path}: {len(ranks)} tokens, but none has rank {absent}; the file is cut or damaged")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ModelError(f"{path}: no token for byte 0x{missing:02x}, so not every text can be encoded; the file is cut or damaged")
    return ranks


def _added_tokens(path: Path, config: dict[str, Any], first: int) -> list[dict[str, Any]]:
    named: dict[int, dict[str, Any]] = {}
    for key, entry in config.get("added_tokens_decoder", {}).items():
        token_id = int(key) if key.isdigit() else -1
        if not first <= token_id < first + NUM_ADDED:
            raise ModelError(
                f"{path}: added token id {key!r:.20} is not in {first}..{first + NUM_ADDED - 1}, the ids behind {FILE}'s ranks"
            )
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise ModelError(f"{path}: added token {key} has no `content`, got {entry!r:.100}")
        named[token_id] = entry
    tokens = []
    for token_id in range(first, first + NUM_ADDED):
        entry = named.get(token_id, {"content": f"<|reserved_token_{token_id}|>", "special": True})
        flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokens.append({"id": token_id, "content": entry["content"], **flags})
    ids: dict[str, int] = {}
    for token in tokens:
        if token["content"] in ids:
            raise ModelError(f"{path}: added tokens {ids[token['content']]} and {token['id']} are both {token['content']!r:.100}")
        ids[token["content"]] = token["id"]
    return tokens
