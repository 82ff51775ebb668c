"""A small tokenizer folder as Kimi ships it, and a plain reading of the same files. In: nothing. Out: files; ids by the book."""

import base64
import json
from functools import cache
from pathlib import Path

import regex
from text_samples import CORPUS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from batchgen.text.pieces import BYTE_CHARS
from batchgen.text.tiktoken_files import KIMI_PATTERN

CODE = "def add_one(value):\n    return value + 1\r\n\r\n\tHTTPServer's IDs DON'T equal 1234567 or x²³ :-)"


@cache
def ranks() -> dict[bytes, int]:
    """Bytes → rank of 256 bytes and 400 merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [*CORPUS, CODE, CODE.lower()], trainers.BpeTrainer(vocab_size=656, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {char: byte for byte, char in BYTE_CHARS.items()}
    return {bytes([byte_of[char] for char in token]): rank for token, rank in tokenizer.get_vocab().items()}


def config() -> dict:
    """tokenizer_config.json: some of the added tokens named, ids right behind the ranks; the format's own are not `special`."""
    first = len(ranks())
    named = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|end_of_msg|>", True), 3: ("<|open|>", False), 4: ("<|sep|>", False)}
    named[255] = ("[PAD]", True)
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "added_tokens_decoder": {str(first + at): {"content": name, "special": special} for at, (name, special) in named.items()},
    }


def model_file() -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks().items(), key=lambda pair: pair[1]))


def write_folder(folder: Path, **config_changes: object) -> Path:
    """tiktoken.model and tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_text(model_file())
    (folder / "tokenizer_config.json").write_text(json.dumps(config() | config_changes))
    return folder


def plain_ids(text: str) -> list[int]:
    """What the ranks say, without any library's merging: cut, then merge the neighbours with the lowest rank, leftmost first."""
    ids = []
    for piece in regex.findall(KIMI_PATTERN, text, regex.V1):
        whole = piece.encode()
        parts = [whole] if whole in ranks() else [bytes([byte]) for byte in whole]
        while True:
            pairs = [(ranks()[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks()]
            if not pairs:
                break
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks()[part] for part in parts]
    return ids
