"""Small tokenizers trained on the spot. In: nothing. Out: parsed tokenizer.json of each kind, and texts that are hard for them."""

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then stops. STOP! End of the story",
    "Das Mädchen aß süße Äpfel — naïve café, Москва и Київ, 你好世界，今天天气很好。日本語のテキスト",
    "😀😃 👨‍👩‍👧‍👦 family 🇩🇪 flags, ½ + ⅓ = ⅚; \t tabs\n\nand  lines  <b>bold</b>",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> dict[str, Any]:
    """Byte-level BPE as Qwen and OLMoE have it; characters split over tokens. `<think>` is an added token that is plain text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return json.loads(tokenizer.to_str())


@cache
def byte_fallback() -> dict[str, Any]:
    """SentencePiece-like BPE as Llama 2 and Mixtral have it: `▁` for spaces, a space put in front, bytes for unknown characters, BOS."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False, limit_alphabet=60)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # words, as SentencePiece trains
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.add_special_tokens(SPECIAL[3:])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [entry for entry in spec["added_tokens"] if not entry["content"].startswith("<0x")]
    return spec


@cache
def metaspace() -> dict[str, Any]:
    """Unigram with Metaspace on the first word only; its vocabulary itself holds `</s>` as a piece."""
    pieces = {char: -5.0 for text in CORPUS for char in text if char != " "}
    pieces |= {"▁": -3.0, "▁the": -2.0, "the": -4.0, "▁quick": -2.0, "quick": -4.0, "▁dog": -2.5}
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0), *pieces.items()]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    return json.loads(tokenizer.to_str())


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}
