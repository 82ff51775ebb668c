"""An expert layer on a GPU, in Triton. In: activations and the router's choice. Out: their outputs. Never waits for the device.

Rows are sorted by expert, gathered while they are multiplied, and gated before they are written; the sum per token is left to what comes
next (`GpuKernels.add_norm`). Every tile of weights streams once for up to 128 rows.

Shapes: T tokens, K experts per token, E experts, R = T * K rows sorted by expert, D model, F expert width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from batchgen.moe.activation import SILU, Activation
from batchgen.moe.expert_sum import ExpertSum

FEW_ROWS = 2048
"""Rows that one program sorts."""
COUNTERS = 16
"""Counters of rows for each expert."""


class Tile(NamedTuple):
    """Work of one program: `rows` x `outputs` in steps of `step` inputs, and how it is compiled."""

    rows: int
    outputs: int
    step: int
    num_warps: int
    num_stages: int


class Choice(NamedTuple):
    """The tiles of both products, up to a mean number of rows per expert."""

    max_rows_per_expert: float
    gate_up: Tile
    down: Tile


TILES = (
    Choice(2, Tile(16, 32, 256, 4, 3), Tile(16, 64, 256, 4, 2)),
    Choice(8, Tile(16, 64, 256, 4, 3), Tile(16, 128, 256, 8, 2)),
    Choice(20, Tile(32, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3)),
    Choice(40, Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)),
    Choice(200, Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3)),
    Choice(float("inf"), Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3)),
)
"""Tiles by mean rows per expert, measured on an H200 (benchmarks/NOTES.md)."""
WIDE_TILE = Tile(16, 32, 32, 4, 2)
"""For types of four bytes."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _sort(ids_ptr, end_ptr, place_ptr, token_ptr, num_rows, k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    expert, row = tl.program_id(0), tl.arange(0, block)
    ids = tl.load(ids_ptr + row, mask=row < num_rows, other=1 << 30)
    mine = (ids == expert).to(tl.int32)
    place = tl.sum((ids < expert).to(tl.int32), 0) + tl.cumsum(mine, 0) - mine
    tl.store(place_ptr + row, place, mask=mine > 0)
    tl.store(token_ptr + place, row // k, mask=mine > 0)
    tl.store(end_ptr + expert, tl.sum((ids <= expert).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rank(  # type: ignore[no-untyped-def]
    ids_ptr, rank_ptr, count_ptr, num_rows, width: tl.constexpr, copies: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    counter = count_ptr + tl.program_id(0) % copies * width + expert
    tl.store(rank_ptr + row, tl.atomic_add(counter, 1, mask=row < num_rows, sem="relaxed"), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    ids_ptr, rank_ptr, count_ptr, end_ptr, token_ptr, num_rows, k: tl.constexpr, num_experts: tl.constexpr, width: tl.constexpr,
    copies: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    copy, e, mine = tl.arange(0, copies), tl.arange(0, width), tl.program_id(0) % copies
    counts = tl.load(count_ptr + copy[:, None] * width + e[None, :])
    total = tl.sum(counts, 0)
    last = tl.cumsum(total, 0)
    base = last - total + tl.sum(tl.where((copy < mine)[:, None], counts, 0), 0)
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < num_rows
    expert = tl.load(ids_ptr + row, mask=inside, other=0).to(tl.int32)
    place = tl.gather(base, expert, 0) + tl.load(rank_ptr + row, mask=inside, other=0)
    tl.store(rank_ptr + row, place, mask=inside)
    tl.store(token_ptr + place, row // k, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(end_ptr + e, last, mask=e < num_experts)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(gate, up, a, b, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    if activation == "situ":
        bounded = a * (2.0 / (1.0 + tl.exp(-2.0 / a * gate)) - 1.0)  # tanh
        return bounded / (1.0 + tl.exp(-gate)) * b * (2.0 / (1.0 + tl.exp(-2.0 / b * up)) - 1.0)
    if activation != "silu":
        gate, up = tl.minimum(gate, b), tl.clamp(up, -b, b)
    if activation == "clamped":
        return gate / (1.0 + tl.exp(-a * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x_ptr, token_ptr, end_ptr, weight_ptr, weight_tma, bias_ptr, out_ptr, a, b, activation: tl.constexpr,
    num_experts: tl.constexpr, experts_width: tl.constexpr, depth: tl.constexpr, width: tl.constexpr, gated: tl.constexpr,
    tma: tl.constexpr, rows: tl.constexpr, outputs: tl.constexpr, step: tl.constexpr, across: tl.constexpr,
):  # fmt: skip
    tile, n = tl.program_id(0) // across, tl.program_id(0) % across * outputs
    e = tl.arange(0, experts_width)
    last_E = tl.load(end_ptr + e, mask=e < num_experts, other=0)
    first_E = tl.load(end_ptr + e - 1, mask=(e > 0) & (e < num_experts), other=0)
    tiles_E = tl.where(e < num_experts, (last_E - first_E + rows - 1) // rows, 0)
    upto_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((upto_E <= tile).to(tl.int32), 0)
    if expert < num_experts:
        top = tl.sum(tl.where(e == expert, first_E + (tile - (upto_E - tiles_E)) * rows, 0), 0)
        row = top + tl.arange(0, rows)
        inside = row < tl.sum(tl.where(e == expert, last_E, 0), 0)
        source = tl.load(token_ptr + row, mask=inside, other=0).to(tl.int64) if gated else row.to(tl.int64)
        output = n + tl.arange(0, outputs)
        first = expert * ((2 if gated else 1) * width) + n
        y = tl.zeros([rows, outputs], tl.float32)
        up = tl.zeros([rows, outputs], tl.float32)
        for start in range(0, depth, step):
            d = start + tl.arange(0, step)
            x = tl.load(x_ptr + source[:, None] * depth + d[None, :], mask=inside[:, None] & (d < depth)[None, :], other=0.0)
            if tma:
                y = tl.dot(x, weight_tma.load([first, start]).T, y)
                if gated:
                    up = tl.dot(x, weight_tma.load([first + width, start]).T, up)
            else:
                known = (d < depth)[:, None] & (output < width)[None, :]
                weight = weight_ptr + (first.to(tl.int64) + tl.arange(0, outputs)[None, :]) * depth + d[:, None]
                y = tl.dot(x, tl.load(weight, mask=known, other=0.0), y, input_precision="ieee")
                if gated:
                    up = tl.dot(x, tl.load(weight + width * depth, mask=known, other=0.0), up, input_precision="ieee")
        if bias_ptr is not None:
            own = bias_ptr + first + tl.arange(0, outputs)
            y += tl.load(own, mask=output < width, other=0.0).to(tl.float32)[None, :]
            if gated:
                up += tl.load(own + width, mask=output < width, other=0.0).to(tl.float32)[None, :]
        if gated:
            y = _activate(y, up, a, b, activation)
        where = row.to(tl.int64)[:, None] * width + output[None, :]
        tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (output < width)[None, :])


def experts(
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    activation: Activation = SILU,
    biases: tuple[Tensor, Tensor] | None = None,
    *,
    choice: Choice | None = None,
) -> ExpertSum:
    """sum over k of weights[t, k] * down(activation(gate(x), up(x))) by expert ids[t, k]. `biases`: [E, 2F], gates first, and [E, D].

    `choice` fixes the tiles; without it they follow the mean number of rows per expert.
    """
    (num_tokens, k), (num_experts, depth, width) = ids_TK.shape, down_EDF.shape
    num_rows = num_tokens * k
    hidden_RF, y_RD = x_TD.new_empty(num_rows, width), x_TD.new_empty(num_rows, depth)
    ints = torch.empty(num_experts + 2 * num_rows, dtype=torch.int32, device=x_TD.device)
    end_E, place_R, token_R = torch.split(ints, [num_experts, num_rows, num_rows])
    if num_rows:
        _sort_rows(ids_TK, end_E, place_R, token_R)
        choice = choice or next(each for each in TILES if num_rows <= each.max_rows_per_expert * num_experts)
        first_bias, last_bias = biases or (None, None)
        _multiply(x_TD, token_R, end_E, gate_up_EFD, first_bias, hidden_RF, tile=choice.gate_up, activation=activation)
        _multiply(hidden_RF, token_R, end_E, down_EDF, last_bias, y_RD, tile=choice.down, activation=None)
    return ExpertSum(y_RD=y_RD, place_R=place_R, weights_TK=weights_TK)


def _sort_rows(ids_TK: Tensor, end_E: Tensor, place_R: Tensor, token_R: Tensor) -> None:
    """Where each expert's rows end, the place of each row, the token of each place. Few rows by one program per expert; many by counters,
    several for each expert, since programs wait for each other at one."""
    num_rows, num_experts, k = ids_TK.numel(), len(end_E), ids_TK.shape[1]
    if num_rows <= FEW_ROWS:
        block = triton.next_power_of_2(num_rows)
        _sort[(num_experts,)](ids_TK, end_E, place_R, token_R, num_rows, k=k, block=block, num_warps=max(1, min(8, block // 128)))
        return
    width = triton.next_power_of_2(num_experts)
    count = torch.zeros(COUNTERS, width, dtype=torch.int32, device=ids_TK.device)
    sizes = {"width": width, "copies": COUNTERS, "block": 256}
    grid = (triton.cdiv(num_rows, 256),)
    _rank[grid](ids_TK, place_R, count, num_rows, **sizes)
    _place[grid](ids_TK, place_R, count, end_E, token_R, num_rows, k=k, num_experts=num_experts, **sizes)


def _multiply(
    x: Tensor,
    token_R: Tensor,
    end_E: Tensor,
    weight_END: Tensor,
    bias_EN: Tensor | None,
    out: Tensor,
    *,
    tile: Tile,
    activation: Activation | None,
) -> None:
    """`activation`: of the first product, whose rows are gathered; None: the second."""
    num_experts, _, depth = weight_END.shape
    (num_rows, width), gated = out.shape, activation is not None
    if x.element_size() == 4:
        tile = WIDE_TILE
    across = triton.cdiv(width, tile.outputs)
    weight_ND = weight_END.view(-1, depth)
    tma = x.element_size() == 2 and depth % 8 == 0 and weight_ND.data_ptr() % 16 == 0  # rows begin at multiples of 16 bytes
    _product[(min(num_rows, num_rows // tile.rows + num_experts) * across,)](
        x, token_R, end_E, weight_ND, TensorDescriptor.from_tensor(weight_ND, [tile.outputs, tile.step]) if tma else None, bias_EN, out,
        *(activation.a, activation.b, activation.kind) if activation else (0.0, 0.0, "none"),
        num_experts=num_experts, experts_width=triton.next_power_of_2(num_experts), depth=depth, width=width, gated=gated, tma=tma,
        rows=tile.rows, outputs=tile.outputs, step=tile.step, across=across, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
