"""An expert layer on a GPU, in Triton. In: activations and the router's choice. Out: weighted sums. Never waits for the device.

Rows are sorted by expert, gathered while they are multiplied, gated before they are written, and summed per token in the router's
order. Every tile of weights streams once for up to 128 rows.

Shapes: T tokens, K experts per token, E experts, R = T * K rows sorted by expert, D model, F expert width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

SORT_BLOCK = 8192
"""Rows that one program of the sort looks at together."""


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
def _sort(ids_ptr, end_ptr, place_ptr, token_ptr, num_rows, k: tl.constexpr, block: tl.constexpr, once: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    first = 0
    if once:
        row = tl.arange(0, block)
        ids = tl.load(ids_ptr + row, mask=row < num_rows, other=1 << 30)
        mine = (ids == expert).to(tl.int32)
        place = tl.sum((ids < expert).to(tl.int32), 0) + tl.cumsum(mine, 0) - mine
        tl.store(place_ptr + row, place, mask=mine > 0)
        tl.store(token_ptr + place, row // k, mask=mine > 0)
        first = tl.sum((ids <= expert).to(tl.int32), 0)
    else:
        for start in range(0, num_rows, block):
            row = start + tl.arange(0, block)
            first += tl.sum((tl.load(ids_ptr + row, mask=row < num_rows, other=expert) < expert).to(tl.int32), 0)
        for start in range(0, num_rows, block):
            row = start + tl.arange(0, block)
            mine = (tl.load(ids_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
            place = first + tl.cumsum(mine, 0) - mine
            tl.store(place_ptr + row, place, mask=mine > 0)
            tl.store(token_ptr + place, row // k, mask=mine > 0)
            first += tl.sum(mine, 0)
    tl.store(end_ptr + expert, first)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x_ptr, token_ptr, end_ptr, weight_ptr, weight_tma, out_ptr,
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
        if gated:
            y = y / (1.0 + tl.exp(-y)) * up
        where = row.to(tl.int64)[:, None] * width + output[None, :]
        tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (output < width)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _combine(y_ptr, place_ptr, weights_ptr, out_ptr, depth: tl.constexpr, k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in tl.static_range(k):
        place = tl.load(place_ptr + token * k + i).to(tl.int64)
        weight = tl.load(weights_ptr + token * k + i)
        total += weight * tl.load(y_ptr + place * depth + d, mask=d < depth, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * depth + d, total.to(out_ptr.dtype.element_ty), mask=d < depth)


def experts(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, choice: Choice | None = None
) -> Tensor:
    """sum over k of weights[t, k] * down(silu(gate(x)) * up(x)) by expert ids[t, k], [T, D].

    `choice` fixes the tiles; without it they follow the mean number of rows per expert.
    """
    (num_tokens, k), (num_experts, depth, width) = ids_TK.shape, down_EDF.shape
    num_rows = num_tokens * k
    out_TD = torch.empty_like(x_TD)
    if not num_tokens:
        return out_TD
    ints = torch.empty(num_experts + 2 * num_rows, dtype=torch.int32, device=x_TD.device)
    end_E, place_R, token_R = torch.split(ints, [num_experts, num_rows, num_rows])
    block = min(SORT_BLOCK, triton.next_power_of_2(num_rows))
    warps = min(8, max(1, block // 128))
    _sort[(num_experts,)](ids_TK, end_E, place_R, token_R, num_rows, k=k, block=block, once=num_rows <= block, num_warps=warps)
    choice = choice or next(each for each in TILES if num_rows <= each.max_rows_per_expert * num_experts)
    hidden_RF, y_RD = x_TD.new_empty(num_rows, width), x_TD.new_empty(num_rows, depth)
    _multiply(x_TD, token_R, end_E, gate_up_EFD, hidden_RF, tile=choice.gate_up, gated=True)
    _multiply(hidden_RF, token_R, end_E, down_EDF, y_RD, tile=choice.down, gated=False)
    block = min(1024, triton.next_power_of_2(depth))
    _combine[(num_tokens, triton.cdiv(depth, block))](y_RD, place_R, weights_TK, out_TD, depth=depth, k=k, block=block)
    return out_TD


def _multiply(x: Tensor, token_R: Tensor, end_E: Tensor, weight_END: Tensor, out: Tensor, *, tile: Tile, gated: bool) -> None:
    num_experts, _, depth = weight_END.shape
    num_rows, width = out.shape
    if x.element_size() == 4:
        tile = WIDE_TILE
    across = triton.cdiv(width, tile.outputs)
    weight_ND = weight_END.view(-1, depth)
    tma = x.element_size() == 2 and depth % 8 == 0 and weight_ND.data_ptr() % 16 == 0  # rows begin at multiples of 16 bytes
    _product[(min(num_rows, num_rows // tile.rows + num_experts) * across,)](
        x, token_R, end_E, weight_ND, TensorDescriptor.from_tensor(weight_ND, [tile.outputs, tile.step]) if tma else None, out,
        num_experts=num_experts, experts_width=triton.next_power_of_2(num_experts), depth=depth, width=width, gated=gated, tma=tma,
        rows=tile.rows, outputs=tile.outputs, step=tile.step, across=across, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
