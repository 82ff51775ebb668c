"""The least time that a batch can take on a device. In: a loaded model, prompts and lengths. Out: seconds, from bytes and operations alone.

A decode step reads the experts it touches (routing taken as uniform), every other matrix but the embedding, all live KV and states once,
at the speed of a copy, or does its arithmetic at the speed of a large product, whichever is longer. A prompt is computed once however
many samples it has. Nothing is speculated.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchgen.models.decoder import Decoder
from batchgen.models.feed_forward import MoeLayer

COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 2048}
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does, measured."""

    bytes_per_s: float
    """Of a copy, read and written."""
    flop_per_s: float
    """Of a product in the type that the model is computed in."""


def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Takes a second or two."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy_s = _shortest(lambda: target.copy_(source), device)
    size = PRODUCT_SIZE[device.type]
    left = torch.ones(size, size, device=device, dtype=dtype)
    product_s = _shortest(lambda: left @ left, device)
    return Rates(2 * source.nbytes / copy_s, 2 * size**3 / product_s)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


@dataclass(slots=True)
class Cost:
    """What tokens cost in a model."""

    dense_bytes: int
    """Matrices that each step reads whole."""
    experts: list[tuple[int, float]]
    """Bytes of each MoE layer's experts, and the part of them that a token goes through."""
    flop_per_token: int
    """Of products with weights, but for the head."""
    head_flop: int
    attention_flop: int
    """Of each pair of a token and one before it, in layers of plain attention."""
    bytes_per_kv_token: int
    bytes_per_state: int

    @classmethod
    def of(cls, model: Decoder, dtype: torch.dtype) -> "Cost":
        """`dtype`: of the KV."""
        config, layout = model.config, model.config.cache_layout
        moe = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MoeLayer)]
        experts, flop = [], 0
        for layer in moe:
            k, count = layer.spec.num_experts_per_tok, layer.spec.num_experts
            experts.append((count * sum(matrix.nbytes for matrix in layer.experts.matrices), k / count))
            flop += 2 * k * sum(matrix.shape.numel() for matrix in layer.experts.matrices)
        one_expert = {id(matrix) for layer in moe for matrix in layer.experts.matrices}
        dense = [matrix for matrix in model.matrices if id(matrix) not in one_expert]
        head_flop = 2 * config.vocab_size * config.hidden_size
        heads = [layer.mixer.heads for layer in config.layers if layer.mixer.plain]
        return cls(
            dense_bytes=sum(matrix.nbytes for matrix in dense),
            experts=experts,
            flop_per_token=flop + 2 * sum(matrix.shape.numel() for matrix in dense) - head_flop,
            head_flop=head_flop,
            attention_flop=sum(4 * each[0] * each[2] for each in heads if each is not None),
            bytes_per_kv_token=layout.bytes_per_token(dtype),
            bytes_per_state=layout.bytes_per_state,
        )

    def floor_s(self, prompts: list[list[int]], lengths: list[int], rates: Rates) -> float:
        """Seconds for the whole batch."""
        unique = {tuple(prompt): len(prompt) for prompt in prompts}
        flop = sum(n * self.flop_per_token + n * n // 2 * self.attention_flop + self.head_flop for n in unique.values())
        seconds = flop / rates.flop_per_s
        ordered, mean_prompt = sorted(lengths), sum(unique.values()) / len(unique)
        for step in range(1, ordered[-1]):
            live = len(ordered) - bisect_right(ordered, step)
            kv = (min(len(unique), live) * mean_prompt + live * step) * self.bytes_per_kv_token + 2 * live * self.bytes_per_state
            touched = sum(size * (1 - (1 - part) ** live) for size, part in self.experts)
            read_s = (self.dense_bytes + touched + kv) / rates.bytes_per_s
            seconds += max(read_s, live * (self.flop_per_token + self.head_flop) / rates.flop_per_s)
        return seconds
