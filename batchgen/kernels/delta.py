"""Layers that carry a state, in Triton. In: a packed batch's activations, states. Out: outputs; states move on. Never waits for the device.

Token by token, as `batchgen.attention.delta` defines them, so results do not depend on how a sequence is cut: a program keeps its part
of a state in registers and goes through the tokens of one sequence.

Shapes: T tokens, B sequences, H heads, G value heads per key head, N = H G, K key size, V value size, C channels, W taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.packing import Spans

CHANNELS = 128
"""Of one program of the convolution."""
VALUES = 32
"""Columns of a state in one program."""
LEAST_ROWS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr, stride, taps_ptr, states_ptr, start_ptr, state_ptr, fresh_ptr, out_ptr, channels: tl.constexpr, num_taps: tl.constexpr,
    block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    b, c = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    known = c < channels
    start, end = tl.load(start_ptr + b), tl.load(start_ptr + b + 1)
    had = tl.where(tl.load(fresh_ptr + b) > 0, 0, channels)  # channels with a past
    past_ptr = states_ptr + (tl.load(state_ptr + b) * channels + c) * (num_taps - 1)
    for t in range(start, end):
        total = tl.zeros([block], tl.float32)
        for w in tl.static_range(num_taps):
            at = t - (num_taps - 1) + w
            now = tl.load(x_ptr + at * stride + c, mask=c < tl.where(at >= start, channels, 0), other=0.0).to(tl.float32)
            before = tl.load(past_ptr + (at - start + num_taps - 1), mask=c < tl.where(at < start, had, 0), other=0.0)
            total += (now + before) * tl.load(taps_ptr + c * num_taps + w, mask=known, other=0.0)
        tl.store(out_ptr + t * channels + c, total / (1.0 + tl.exp(-total)), mask=known)
    w = tl.arange(0, width)
    at = (end - (num_taps - 1) + w)[None, :]
    inside = (c < tl.where(end > start, channels, 0))[:, None] & (w < num_taps - 1)[None, :]
    now = tl.load(x_ptr + at * stride + c[:, None], mask=inside & (at >= start), other=0.0).to(tl.float32)
    before = tl.load(past_ptr[:, None] + (at - start + num_taps - 1), mask=inside & (at < start) & (c < had)[:, None], other=0.0)
    tl.debug_barrier()  # all of the old state is read
    tl.store(past_ptr[:, None] + w[None, :], now + before, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _delta_rule(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, states_ptr, start_ptr, state_ptr, fresh_ptr, out_ptr, num_heads: tl.constexpr,
    num_values: tl.constexpr, depth: tl.constexpr, width: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    b, n = tl.program_id(0), tl.program_id(1)
    head = n * num_heads // num_values
    i, j = tl.arange(0, rows), tl.program_id(2) * block + tl.arange(0, block)
    in_depth, in_width = i < depth, j < width
    inside = in_depth[:, None] & in_width[None, :]
    place = (tl.load(state_ptr + b) * num_values + n) * depth
    where = states_ptr + (place + i[:, None]) * width + j[None, :]
    had = tl.where(tl.load(fresh_ptr + b) > 0, 0, depth)
    state = tl.load(where, mask=inside & (i < had)[:, None], other=0.0)
    for t in range(tl.load(start_ptr + b), tl.load(start_ptr + b + 1)):
        key = tl.load(k_ptr + (t * num_heads + head) * depth + i, mask=in_depth, other=0.0)
        query = tl.load(q_ptr + (t * num_heads + head) * depth + i, mask=in_depth, other=0.0)
        value = tl.load(v_ptr + (t * num_values + n) * width + j, mask=in_width, other=0.0)
        if wide:
            state *= tl.exp(tl.load(decay_ptr + (t * num_values + n) * depth + i, mask=in_depth, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(decay_ptr + t * num_values + n))
        change = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta_ptr + t * num_values + n)
        state += key[:, None] * change[None, :]
        tl.store(out_ptr + (t * num_values + n) * width + j, tl.sum(state * query[:, None], 0), mask=in_width)
    tl.store(where, state, mask=inside)


def convolve(x_TC: Tensor, taps_CW: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """silu of a causal convolution per channel, float32 [T, C]. `states` [., C, W - 1]: last inputs, oldest first; updated."""
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    (num_tokens, channels), num_taps = x_TC.shape, taps_CW.shape[1]
    out_TC = torch.empty(num_tokens, channels, dtype=torch.float32, device=x_TC.device)
    sizes = {"channels": channels, "num_taps": num_taps, "block": CHANNELS, "width": max(1, triton.next_power_of_2(num_taps - 1))}
    grid = (len(spans.state_B), triton.cdiv(channels, CHANNELS))
    _convolve[grid](x_TC, x_TC.stride(0), taps_CW, states, *_placed(spans), out_TC, **sizes)
    return out_TC


def delta_rule(q_THK: Tensor, k_THK: Tensor, v_TNV: Tensor, log_decay: Tensor, beta_TN: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """float32 [T, N, V]. `log_decay` [T, N, K], or [T, N] for all K alike; `states` [., N, K, V]: updated."""
    (num_heads, depth), (num_values, width) = q_THK.shape[1:], v_TNV.shape[1:]
    inputs = [x.float().contiguous() for x in (q_THK, k_THK, v_TNV, log_decay, beta_TN)]
    out_TNV = torch.empty_like(inputs[2])
    sizes = {"num_heads": num_heads, "num_values": num_values, "depth": depth, "width": width, "wide": log_decay.dim() == 3}
    block = min(VALUES, max(LEAST_ROWS, triton.next_power_of_2(width)))
    grid = (len(spans.state_B), num_values, triton.cdiv(width, block))
    _delta_rule[grid](*inputs, states, *_placed(spans), out_TNV, **sizes, rows=max(LEAST_ROWS, triton.next_power_of_2(depth)), block=block)
    return out_TNV


def _placed(spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    return spans.start_B, spans.state_B, spans.fresh_B
