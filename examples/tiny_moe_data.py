"""Training text of the bundled model. In: reasoning-gym's generators, our worked solutions. Out: a tokenizer and endless packed batches."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import reasoning_gym
from tiny_moe_solutions import direct, worked
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollout.demo.tasks import DIFFICULTY, KINDS, make_item

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
KIND_WEIGHTS = {kind: 0.5 if kind in ("number_sorting", "countdown") else 1.0 for kind in KINDS}
OWN_ITEMS = {kind: 0.8 if kind == "countdown" else 0.3 for kind in KINDS}
"""Share of items from `rollout.demo.tasks` (the same tasks, other words, no slow algebra); the rest are reasoning-gym's."""
BARE_PROMPTS = 0.08
"""Share of prompts without chat markers, so that plain text prompts work too."""


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str
    response: str


def chat_prompt(question: str) -> str:
    return f"<|bos|><|user|>{question}<|assistant|>"


def examples(seed: int, worked_share: float) -> Iterator[Example]:
    """Endless examples. `worked_share` of the responses show their steps, whatever the question; the others only state the answer."""
    rng = random.Random(seed)
    size = 1 << 20
    sets = {kind: reasoning_gym.create_dataset(kind, seed=rng.getrandbits(40), size=size, **DIFFICULTY[kind]) for kind in KINDS}
    kinds, weights = list(KIND_WEIGHTS), list(KIND_WEIGHTS.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        if rng.random() < OWN_ITEMS[kind]:
            item = make_item(kind, rng)
            question, answer, metadata = item.question, item.answer, item.metadata
        else:
            entry = sets[kind][rng.randrange(size)]
            question, answer, metadata = entry["question"], entry["answer"], entry["metadata"]
        try:
            response = worked(kind, metadata, answer) if rng.random() < worked_share else direct(answer)
        except ValueError:
            continue
        yield Example(question if rng.random() < BARE_PROMPTS else chat_prompt(question), response)


def train_tokenizer(folder: Path, vocab_size: int, num_examples: int, seed: int) -> Tokenizer:
    """Byte-level BPE with single digits; writes `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    letters = [f" {letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] * num_examples
    stream = examples(seed, worked_share=0.5)
    texts = [text for _ in range(num_examples) for example in [next(stream)] for text in (example.prompt, example.response)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([part for text in texts for part in re.split(r"<\|\w+\|>", text)] + letters, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


@dataclass(frozen=True, slots=True)
class TextBatch:
    """One optimiser step's sequences, laid end to end."""

    ids_T: np.ndarray
    lengths_B: np.ndarray
    predict_M: np.ndarray
    """Positions in T whose next token is part of a response."""
    targets_M: np.ndarray
    """Those next tokens."""


def encode_batch(tokenizer: Tokenizer, batch: list[Example]) -> TextBatch:
    """Tokenise; every response ends in EOS."""
    eos = tokenizer.token_to_id("<|eos|>")
    prompts = tokenizer.encode_batch_fast([example.prompt for example in batch])
    responses = tokenizer.encode_batch_fast([example.response for example in batch])
    ids: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    lengths = []
    for prompt, response in zip(prompts, responses, strict=True):
        start = len(ids)
        ids += prompt.ids + response.ids
        predict += range(start + len(prompt.ids) - 1, len(ids))
        targets += [*response.ids, eos]
        lengths.append(len(ids) - start)
    return TextBatch(*(np.array(column, dtype=np.int64) for column in (ids, lengths, predict, targets)))
