"""Sampling on a GPU in Triton. In: logits and slot arrays. Out: a token and its logprob per row. Reads the logits once, writes none.

For rows that draw from the whole vocabulary at their temperature, or take the likeliest token: `batchgen.draw.draw` and `greedy` in two
kernels. The random numbers are those of `batchgen.rng`, bit for bit.

Shapes: B rows, S slots, V vocabulary, N blocks of the vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Ids of one block."""


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    zero = tl.zeros_like(position).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    a, b, _, _ = tl.philox(seed.to(tl.uint64), low, zero, high, zero)
    return ((a.to(tl.int64) << 21) | (b.to(tl.int64) >> 11)).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _fill_uniforms(seed_ptr, slot_ptr, position_ptr, out_ptr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out_ptr + row, _uniform(tl.load(seed_ptr + tl.load(slot_ptr + row)), tl.load(position_ptr + row)))


@triton.jit  # type: ignore[untyped-decorator]
def _measure_blocks(  # type: ignore[no-untyped-def]
    logits_ptr, slot_ptr, temperature_ptr, most_ptr, mass_ptr, vocab: tl.constexpr, num_blocks: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = n * block + tl.arange(0, block)
    temperature = tl.load(temperature_ptr + tl.load(slot_ptr + row))
    logits = tl.load(logits_ptr + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(logits))
    most = tl.max(scaled, 0)
    mass = tl.sum(tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - most)), 0)
    tl.store(most_ptr + row * num_blocks + n, most)
    tl.store(mass_ptr + row * num_blocks + n, mass)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits_ptr, slot_ptr, temperature_ptr, seed_ptr, position_ptr, most_ptr, mass_ptr, token_ptr, logprob_ptr, failed_ptr,
    vocab: tl.constexpr, num_blocks: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    n = tl.arange(0, width)
    most_N = tl.load(most_ptr + row * num_blocks + n, mask=n < num_blocks, other=float("-inf"))
    most = tl.max(most_N, 0)
    mass_N = tl.load(mass_ptr + row * num_blocks + n, mask=n < num_blocks, other=0.0).to(tl.float64)
    mass_N *= tl.where(most_N == float("-inf"), 0.0, tl.exp(most_N - most)).to(tl.float64)
    total = tl.sum(mass_N, 0)
    upper_N = tl.cumsum(mass_N, 0)
    target = _uniform(tl.load(seed_ptr + slot), tl.load(position_ptr + row)) * total
    drawn = tl.minimum(tl.sum(((upper_N <= target) & (n < num_blocks)).to(tl.int32), 0), num_blocks - 1)
    likeliest = tl.min(tl.where((most_N == most) & (n < num_blocks), n, width), 0)
    chosen = tl.where(is_greedy, tl.minimum(likeliest, num_blocks - 1), drawn)
    mass = tl.sum(tl.where(n == chosen, mass_N, 0.0), 0)
    before = tl.sum(tl.where(n == chosen, upper_N, 0.0), 0) - mass
    inside = tl.minimum(tl.maximum((target - before) / mass, 0.0), 0.9999999999999999)
    v = tl.arange(0, block)
    token = chosen * block + v
    logits = tl.load(logits_ptr + row * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(logits, divisor + tl.zeros_like(logits))
    p = tl.where(scaled == float("-inf"), 0.0, tl.exp(scaled - most)).to(tl.float64)
    upper = tl.cumsum(p, 0)
    drawn = tl.sum((upper <= inside * tl.sum(p, 0)).to(tl.int32), 0)
    likeliest = tl.min(tl.where(scaled == most, v, block), 0)
    place = tl.minimum(tl.where(is_greedy, likeliest, drawn), block - 1)
    value = tl.sum(tl.where(v == place, scaled, 0.0), 0)
    failed = (total != total) | (most == float("inf")) | (total == 0.0)
    tl.store(token_ptr + row, tl.where(failed, 0, tl.minimum(chosen * block + place, vocab - 1)).to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(failed, 0.0, ((value - most).to(tl.float64) - tl.log(total)).to(tl.float32)))
    tl.store(failed_ptr + row, failed)


def uniforms(seed_S: Tensor, slots_B: Tensor, positions_B: Tensor) -> Tensor:
    """Float64 [B] in [0, 1): `batchgen.rng.uniforms` of each row's seed and position."""
    out_B = torch.empty(len(slots_B), dtype=torch.float64, device=slots_B.device)
    if len(slots_B):
        _fill_uniforms[(len(slots_B),)](seed_S, slots_B, positions_B, out_B)
    return out_B


def draw_plain(
    logits_BV: Tensor, slots_B: Tensor, temperature_S: Tensor, seed_S: Tensor, positions_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64, logprobs at the row's temperature float32, and failed bool (NaN or infinite logits), each [B].

    logits_BV: float32 or bfloat16. temperature_S: float32, 0 for the likeliest token. seed_S: int64 bits of the 64-bit seeds.
    """
    (num_rows, vocab), device = logits_BV.shape, logits_BV.device
    num_blocks = triton.cdiv(vocab, BLOCK)
    most_BN, mass_BN = torch.empty(2, num_rows, num_blocks, dtype=torch.float32, device=device)
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(num_rows, dtype=torch.float32, device=device)
    failed_B = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows:
        sizes = {"vocab": vocab, "num_blocks": num_blocks, "block": BLOCK}
        _measure_blocks[(num_rows, num_blocks)](logits_BV, slots_B, temperature_S, most_BN, mass_BN, **sizes)
        where = (logits_BV, slots_B, temperature_S, seed_S, positions_B)
        width = triton.next_power_of_2(num_blocks)
        _choose[(num_rows,)](*where, most_BN, mass_BN, tokens_B, logprobs_B, failed_B, width=width, num_warps=8, **sizes)
    return tokens_B, logprobs_B, failed_B
