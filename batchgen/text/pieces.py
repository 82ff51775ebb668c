"""From token ids to bytes. In: a parsed tokenizer.json. Out: the bytes each id stands for, so that text is one UTF-8 stream.

Bytes are exact where decoding windows of ids is not: no id is decoded twice, and an unfinished character is a few pending bytes.
"""

from typing import Any

from batchgen.errors import ModelError


def token_pieces(spec: dict[str, Any], vocab: dict[str, int], special_ids: frozenset[int]) -> tuple[list[bytes], bool]:
    """Bytes of every id (none for special ids and gaps), and whether a single space that opens a text is dropped.

    Follows the decoder that tokenizer.json names; what `tokenizers` would decode from ids that form valid UTF-8 is what these bytes
    spell. Raises ModelError for a decoder that does not work token by token.
    """
    steps = _steps(spec.get("decoder"))
    drops_space = False
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    converters = []
    for step in steps:
        kind = step.get("type")
        if kind == "Strip" and step.get("content") == " " and (step.get("start"), step.get("stop")) == (1, 0):
            drops_space = True
        elif kind == "Metaspace":
            drops_space = step.get("prepend_scheme", "always") != "never"
            converters.append(_replacer(step.get("replacement", "▁"), " "))
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            converters.append(_replacer(step["pattern"]["String"], step["content"]))
        elif kind == "ByteLevel":
            converters.append(_byte_level)
        elif kind == "ByteFallback":
            converters.append(_byte_fallback)
        elif kind != "Fuse":
            raise ModelError(
                f"tokenizer.json: decoder {kind!r} is not supported; supported: ByteLevel, Metaspace, and sequences of "
                "Replace (of a string), ByteFallback, Fuse and Strip (of one leading space)"
            )
    for token, token_id in vocab.items():
        if token_id in special_ids:
            continue
        piece: str | bytes = token
        for convert in converters:
            if isinstance(piece, str):
                piece = convert(piece)
        pieces[token_id] = piece.encode(errors="replace") if isinstance(piece, str) else piece
    return pieces, drops_space


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelError("tokenizer.json has no decoder, so ids cannot be turned into text; save the tokenizer with its decoder")
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def _replacer(old: str, new: str) -> Any:
    return lambda token: token.replace(old, new)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
BYTE_CHARS = {byte: char for char, byte in _BYTE_OF.items()}
"""Byte → the character that stands for it in a byte-level vocabulary."""


def _byte_level(token: str) -> str | bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token: plain text
        return token


def _byte_fallback(token: str) -> str | bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token
    return token
