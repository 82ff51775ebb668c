"""Attention over paged KV in Triton. In: queries, one layer's pages, tiles of queries. Out: attention outputs. Never gathers KV.

A tile holds up to `tile_queries` tokens of one row, and all query heads that share a KV head; its keys stream once, with a running
softmax in float32 (Dao et al. 2022).

Shapes: T tokens, N tiles, B rows, P pages, H KV heads, G query heads per KV head, S slots of a page, D head size.
"""

import triton
import triton.language as tl
from torch import Tensor

MIN_DOT_ROWS = 16
"""Least rows of a `tl.dot` operand."""


@triton.jit(do_not_specialize=["table_width"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    positions_ptr,
    first_ptr,
    count_ptr,
    row_ptr,
    table_width,
    scale,
    num_heads,
    group: tl.constexpr,
    queries: tl.constexpr,
    rows: tl.constexpr,
    depth: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, rows)
    query = row // group
    valid = (query < tl.load(count_ptr + tile)) & (query < queries)
    token = tl.load(first_ptr + tile) + query
    d = tl.arange(0, depth)
    where = ((token * num_heads + head) * group + row % group)[:, None] * depth + d[None, :]
    q = tl.load(q_ptr + where, mask=valid[:, None], other=0.0)
    position = tl.load(positions_ptr + token, mask=valid, other=-1)
    last = tl.max(position, 0)
    pages = table_ptr + tl.load(row_ptr + tile) * table_width
    most = tl.full([rows], -1e38, tl.float32)  # finite: rows that are padding see no key
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, depth], tl.float32)
    for start in range(0, last + 1, block):
        key = start + tl.arange(0, block)
        seen = key <= last
        page = tl.load(pages + key // page_size, mask=seen, other=0)
        offset = ((page * num_heads + head) * page_size + key % page_size)[:, None] * depth + d[None, :]
        k = tl.load(k_ptr + offset, mask=seen[:, None], other=0.0)
        v = tl.load(v_ptr + offset, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - highest)
        p = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = highest
    out = sums / tl.where(valid, total, 1.0)[:, None]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def attend(
    q_THGD: Tensor,
    k_PHSD: Tensor,
    v_PHSD: Tensor,
    page_table_BP: Tensor,
    positions_T: Tensor,
    first_N: Tensor,
    count_N: Tensor,
    row_N: Tensor,
    out_THGD: Tensor,
    *,
    tile_queries: int,
    scale: float,
) -> None:
    """Fill `out_THGD` for the tokens of the tiles: tile n has `count_N[n]` tokens from `first_N[n]` on, all of row `row_N[n]`. Head sizes
    are powers of two."""
    _, num_heads, group, depth = q_THGD.shape
    rows = max(MIN_DOT_ROWS, triton.next_power_of_2(tile_queries * group))
    fits = depth * k_PHSD.element_size() <= 256  # three blocks of keys and values in shared memory
    is_decode = rows == MIN_DOT_ROWS
    _attend[(len(first_N), num_heads)](
        q_THGD,
        k_PHSD,
        v_PHSD,
        out_THGD,
        page_table_BP,
        positions_T,
        first_N,
        count_N,
        row_N,
        page_table_BP.shape[1],
        scale,
        num_heads,
        group=group,
        queries=tile_queries,
        rows=rows,
        depth=depth,
        page_size=k_PHSD.shape[2],
        block=128 if fits else 32,
        num_warps=4 if is_decode else 8,
        num_stages=2 if is_decode or not fits else 3,
    )
