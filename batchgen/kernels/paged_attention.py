"""Attention over paged KV in Triton. In: queries, one layer's pages, tiles of queries. Out: attention outputs. Never gathers KV.

A tile holds up to `queries` tokens that see the same pages, and all query heads that share a KV head; its keys stream once, with a
running softmax in float32 (Dao et al. 2022). A window limits keys to a token's last ones; a sink is a score without a value. The state
of that softmax can be kept and taken up again: for keys that several rows share (the prompt of a group), and for keys split over several
programs, whose states are merged. Keys may be a latent whose first columns are the values, with `extra` columns behind them.

Shapes: T tokens, N tiles, P pages, H KV heads, J blocks of query heads, G query heads of a block, S slots of a page, C key size,
D value size, X parts of a row's keys.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_DOT_ROWS = 16
"""Least rows of a `tl.dot` operand."""
LARGE_TILE = 32768
"""Sums of a program that take eight warps to hold."""


@dataclass(slots=True, kw_only=True)
class Tiles:
    """Which tokens attend to which keys: tile n has `count_N[n]` tokens from `first_N[n]` on, which see the pages in row `row_N[n]` of the
    table, each up to its own position. int64."""

    queries: int
    """Most tokens of a tile."""
    first_N: Tensor
    count_N: Tensor
    row_N: Tensor
    table: Tensor
    begin_N: Tensor | None = None
    """First key; those before it are in the state that is taken up. None: 0."""
    end_N: Tensor | None = None
    """Key after the last; None: up to the token's position."""


@dataclass(slots=True, kw_only=True)
class SoftmaxState:
    """Unfinished attention of every token, in X parts."""

    sums_XTJGD: Tensor
    """float32"""
    stats_2XTJG: Tensor
    """float32: largest score in base 2, sum of weights."""

    @classmethod
    def empty(cls, num_parts: int, q_TJGC: Tensor, depth: int) -> "SoftmaxState":
        shape = (num_parts, *q_TJGC.shape[:-1])
        return cls(
            sums_XTJGD=torch.empty(*shape, depth, dtype=torch.float32, device=q_TJGC.device),
            stats_2XTJG=torch.empty(2, *shape, dtype=torch.float32, device=q_TJGC.device),
        )


@triton.jit(do_not_specialize=["num_pages"])  # type: ignore[untyped-decorator]
def _copy_pages(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, pages_ptr, k_out_ptr, v_out_ptr, num_pages,
    num_heads: tl.constexpr, page_size: tl.constexpr, depth: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    n, head = tl.program_id(0), tl.program_id(1)
    page, first = tl.load(pages_ptr + n), tl.load(pages_ptr + num_pages + n)
    s, d = tl.arange(0, page_size), tl.arange(0, width)
    inside = (s < tl.load(pages_ptr + 2 * num_pages + n))[:, None] & (d < depth)[None, :]
    source = ((page * num_heads + head) * page_size + s)[:, None] * depth + d[None, :]
    target = ((first + s) * num_heads + head)[:, None] * depth + d[None, :]
    tl.store(k_out_ptr + target, tl.load(k_ptr + source, mask=inside), mask=inside)
    tl.store(v_out_ptr + target, tl.load(v_ptr + source, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _take_block(  # type: ignore[no-untyped-def]
    q, q_extra, k_ptr, v_ptr, pages, start, high, position, head, scale, most, total, sums, kv_heads: tl.constexpr, depth: tl.constexpr,
    extra: tl.constexpr, page_size: tl.constexpr, block: tl.constexpr, masked: tl.constexpr, window: tl.constexpr,
):  # fmt: skip
    d, offset = tl.arange(0, depth), tl.arange(0, block)
    key = start + offset
    if masked:
        page = tl.load(pages + key // page_size, mask=key < high, other=0)
    elif block % page_size == 0:  # blocks begin with a page
        page = tl.load(pages + start // page_size + offset // page_size)
    else:
        page = tl.load(pages + key // page_size)
    slot = ((page * kv_heads + head) * page_size + key % page_size)[:, None]
    where = slot * (depth + extra) + d[None, :]
    inside = (key < high)[:, None]
    k = tl.load(k_ptr + where, mask=inside, other=0.0) if masked else tl.load(k_ptr + where)
    if v_ptr is None:
        v = k
    else:
        v = tl.load(v_ptr + slot * depth + d[None, :], mask=inside, other=0.0) if masked else tl.load(v_ptr + slot * depth + d[None, :])
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if extra > 0:
        beyond = k_ptr + slot * (depth + extra) + depth + tl.arange(0, extra)[None, :]
        k_extra = tl.load(beyond, mask=inside, other=0.0) if masked else tl.load(beyond)
        scores = tl.dot(q_extra, tl.trans(k_extra), scores, input_precision="ieee")
    scores *= scale
    if masked:
        seen = (key < high)[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            seen &= key[None, :] > position[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    highest = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - highest)
    p = tl.exp2(scores - highest[:, None])
    total = total * shrink + tl.sum(p, 1)
    sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return highest, total, sums


@triton.jit(do_not_specialize=["table_width", "state_size"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, positions_ptr, first_ptr, count_ptr, row_ptr, begin_ptr, end_ptr, from_sums_ptr,
    from_stats_ptr, sums_ptr, stats_ptr, sinks_ptr, table_width, state_size, scale, num_blocks: tl.constexpr, kv_heads: tl.constexpr,
    group: tl.constexpr, queries: tl.constexpr, window: tl.constexpr, rows: tl.constexpr, depth: tl.constexpr, extra: tl.constexpr,
    page_size: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    tile, block_of_heads, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = block_of_heads * kv_heads // num_blocks
    row = tl.arange(0, rows)
    query = row // group
    count = tl.minimum(tl.load(count_ptr + tile), queries)
    valid = query < count
    token = tl.load(first_ptr + tile) + query
    d = tl.arange(0, depth)
    head_row = (token * num_blocks + block_of_heads) * group + row % group
    where = head_row[:, None] * depth + d[None, :]
    q_where = q_ptr + head_row[:, None] * (depth + extra)
    q = tl.load(q_where + d[None, :], mask=valid[:, None], other=0.0)
    q_extra = tl.load(q_where + depth + tl.arange(0, extra)[None, :], mask=valid[:, None], other=0.0) if extra > 0 else 0.0
    position = tl.load(positions_ptr + token, mask=valid, other=-1)
    low, high = tl.zeros_like(tl.max(position, 0)), tl.max(position, 0) + 1
    if end_ptr is not None:
        high = tl.minimum(high, tl.load(end_ptr + tile))
    most = tl.full([rows], -1e38, tl.float32)  # finite: rows that are padding see no key
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, depth], tl.float32)
    if begin_ptr is not None:
        low = tl.load(begin_ptr + tile)
        resumed = query < tl.where((low > 0) & (part == 0), count, 0)  # by one program of a row
        most = tl.load(from_stats_ptr + head_row, mask=resumed, other=-1e38)
        total = tl.load(from_stats_ptr + state_size + head_row, mask=resumed, other=0.0)
        sums = tl.load(from_sums_ptr + where, mask=resumed[:, None], other=0.0)
    lowest = tl.min(tl.where(valid, position, high), 0)
    if window > 0:
        low = tl.maximum(low, (lowest + 1 - window) // block * block)
    if parts > 1:
        length = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), parts), block) * block
        low += part * length
        high = tl.minimum(high, low + length)
    pages = table_ptr + tl.load(row_ptr + tile) * table_width
    scale *= 1.4426950408889634
    whole = low  # up to here every query sees every key
    if window == 0:
        whole += tl.maximum(tl.minimum(lowest + 1, high) - low, 0) // block * block
    for start in range(low, whole, block):
        most, total, sums = _take_block(
            q,
            q_extra,
            k_ptr,
            v_ptr,
            pages,
            start,
            high,
            position,
            head,
            scale,
            most,
            total,
            sums,
            kv_heads,
            depth,
            extra,
            page_size,
            block,
            False,
            0,
        )
    for start in range(whole, high, block):
        most, total, sums = _take_block(
            q,
            q_extra,
            k_ptr,
            v_ptr,
            pages,
            start,
            high,
            position,
            head,
            scale,
            most,
            total,
            sums,
            kv_heads,
            depth,
            extra,
            page_size,
            block,
            True,
            window,
        )
    if keep:
        tl.store(stats_ptr + part * state_size + head_row, most, mask=valid)
        tl.store(stats_ptr + (parts + part) * state_size + head_row, total, mask=valid)
        tl.store(sums_ptr + part.to(tl.int64) * state_size * depth + where, sums, mask=valid[:, None])
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + block_of_heads * group + row % group) * 1.4426950408889634
            highest = tl.maximum(most, sink)
            shrink = tl.exp2(most - highest)
            total = total * shrink + tl.exp2(sink - highest)
            sums *= shrink[:, None]
        out = sums / tl.where(valid, total, 1.0)[:, None]
        tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["state_size"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    sums_ptr, stats_ptr, sinks_ptr, out_ptr, state_size, heads: tl.constexpr, parts: tl.constexpr, width: tl.constexpr, depth: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x, d = tl.arange(0, width), tl.arange(0, depth)
    most = tl.load(stats_ptr + x * state_size + row, mask=x < parts, other=-1e38)
    total = tl.load(stats_ptr + (parts + x) * state_size + row, mask=x < parts, other=0.0)
    highest, extra = tl.max(most, 0), 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + row % heads) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
        extra = tl.exp2(sink - highest)
    weight = tl.exp2(most - highest)
    where = x.to(tl.int64)[:, None] * state_size * depth + row * depth + d[None, :]
    sums = tl.sum(tl.load(sums_ptr + where, mask=(x < parts)[:, None], other=0.0) * weight[:, None], 0)
    tl.store(out_ptr + row * depth + d, (sums / (tl.sum(total * weight, 0) + extra)).to(out_ptr.dtype.element_ty))


def copy_pages(k_PHSD: Tensor, v_PHSD: Tensor, pages_3N: Tensor, k_CHD: Tensor, v_CHD: Tensor) -> None:
    """Copy keys and values out of their pages. `pages_3N`: page, row of its first key among the C rows of the targets, number of keys."""
    num_heads, page_size, depth = k_PHSD.shape[1:]
    width = triton.next_power_of_2(depth)
    _copy_pages[(pages_3N.shape[1], num_heads)](
        k_PHSD, v_PHSD, pages_3N, k_CHD, v_CHD, pages_3N.shape[1], num_heads=num_heads, page_size=page_size, depth=depth, width=width
    )


def attend(
    q_TJGC: Tensor,
    k_PHSC: Tensor,
    v_PHSD: Tensor | None,
    positions_T: Tensor,
    tiles: Tiles,
    *,
    depth: int,
    scale: float,
    out_TJGD: Tensor | None = None,
    resume: SoftmaxState | None = None,
    num_parts: int = 1,
    window: int = 0,
    sinks_N: Tensor | None = None,
) -> SoftmaxState | None:
    """Attention of the tiles' tokens. `depth`, the size of values, is a power of two, and so is what keys have beyond it. Without
    `v_PHSD`, values are the first columns of the keys. H divides J.

    Fills those tokens of `out_TJGD`; without it, returns the state, for `resume` (of one part). `num_parts` programs share a tile's keys;
    then the tiles cover all tokens. `sinks_N` (float32) count where outputs are made.
    """
    num_tokens, num_blocks, group, key_dim = q_TJGC.shape
    keep = num_parts > 1 or out_TJGD is None
    state = SoftmaxState.empty(num_parts, q_TJGC, depth) if keep else None
    size = num_tokens * num_blocks * group
    rows = max(MIN_DOT_ROWS, triton.next_power_of_2(tiles.queries * group))
    fits = depth * k_PHSC.element_size() <= 256  # some blocks of keys and values, in shared memory
    is_decode = rows == MIN_DOT_ROWS
    _attend[(len(tiles.first_N), num_blocks, num_parts)](
        q_TJGC,
        k_PHSC,
        v_PHSD,
        out_TJGD,
        tiles.table,
        positions_T,
        tiles.first_N,
        tiles.count_N,
        tiles.row_N,
        tiles.begin_N,
        tiles.end_N,
        resume.sums_XTJGD if resume else None,
        resume.stats_2XTJG if resume else None,
        state.sums_XTJGD if state else None,
        state.stats_2XTJG if state else None,
        sinks_N,
        tiles.table.shape[1],
        size,
        scale,
        num_blocks=num_blocks,
        kv_heads=k_PHSC.shape[1],
        group=group,
        queries=tiles.queries,
        window=window,
        rows=rows,
        depth=depth,
        extra=key_dim - depth,
        page_size=k_PHSC.shape[2],
        block=64 if is_decode and fits else 32,
        parts=num_parts,
        keep=keep,
        num_warps=8 if rows * depth >= LARGE_TILE else 4,
        num_stages=2 if is_decode or not fits else 4,
    )
    if state is None or out_TJGD is None:
        return state
    width = triton.next_power_of_2(num_parts)
    sizes = {"heads": num_blocks * group, "parts": num_parts, "width": width, "depth": depth}
    _merge[(size,)](state.sums_XTJGD, state.stats_2XTJG, sinks_N, out_TJGD, size, **sizes, num_warps=1)
    return None
