"""What a decoder computes on a GPU, small operations fused in Triton. In: CUDA tensors. Out: CUDA tensors. Never waits for the device.

The interface is that of `batchgen.kernels.cpu.CpuKernels`; products are the libraries' own (cuBLAS, torch's grouped product).

Shapes: T tokens, K experts per token, E experts, R = T * K rows sorted by expert, D model or head size, F expert width, H heads,
N outputs or rows to copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

ELEMENTS = 2048
"""Values that one program handles at a time."""
FEW_ROWS = 16
"""Mean rows per expert up to which the weights' bytes decide: our product streams them once; above, torch's grouped product."""


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rms_norm(x_ptr, weight_ptr, out_ptr, stride, eps, num_rows, heads, depth: tl.constexpr, width: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    d = tl.arange(0, width)
    inside = (row < num_rows)[:, None] & (d < depth)[None, :]
    x = tl.load(x_ptr + (row // heads * stride + row % heads * depth)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / depth + eps)
    weight = tl.load(weight_ptr + d, mask=d < depth, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * depth + d[None, :], x * scale[:, None] * weight[None, :], mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rotate(x_ptr, table_ptr, out_ptr, stride, num_rows, heads, depth: tl.constexpr, half: tl.constexpr, rows: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    d = tl.arange(0, half)
    inside = (row < num_rows)[:, None] & (d < depth // 2)[None, :]
    where = (row // heads * stride + row % heads * depth)[:, None] + d[None, :]
    angle = (row // heads * 2 * depth)[:, None] + d[None, :]
    low = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + where + depth // 2, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(table_ptr + angle + depth + depth // 2, mask=inside, other=0.0)
    out = out_ptr + row[:, None] * depth + d[None, :]
    tl.store(out, low * cos - high * sin, mask=inside)
    tl.store(out + depth // 2, high * cos + low * sin, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits_ptr, ids_ptr, weights_ptr, num_tokens, normalise: tl.constexpr, num_experts: tl.constexpr, width: tl.constexpr,
    k: tl.constexpr, k_width: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    token, expert, place = tl.program_id(0) * tokens + tl.arange(0, tokens), tl.arange(0, width), tl.arange(0, k_width)
    known = (expert < num_experts)[None, :]
    inside = (token < num_tokens)[:, None]
    logits = tl.load(logits_ptr + token[:, None] * num_experts + expert[None, :], mask=inside & known, other=0.0).to(tl.float32)
    logits = tl.where(known, logits, float("-inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    left = tl.where(known, p, -2.0)
    ids, weights = tl.zeros([tokens, k_width], tl.int32), tl.zeros([tokens, k_width], tl.float32)
    for i in tl.static_range(k):
        best = tl.minimum(tl.argmax(left, 1, tie_break_left=True), num_experts - 1)
        here = expert[None, :] == best[:, None]
        ids = tl.where(place[None, :] == i, best[:, None], ids)
        weights = tl.where(place[None, :] == i, tl.sum(tl.where(here, p, 0.0), 1)[:, None], weights)
        left = tl.where(here, -1.0, left)
    if normalise:
        weights = weights / tl.sum(weights, 1)[:, None]
    where = token[:, None] * k + place[None, :]
    tl.store(ids_ptr + where, ids.to(tl.int64), mask=inside & (place < k)[None, :])
    tl.store(weights_ptr + where, weights, mask=inside & (place < k)[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rank(ids_ptr, rank_ptr, count_ptr, num_rows, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * block + tl.arange(0, block)
    expert = tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    rank = tl.atomic_add(count_ptr + expert, 1, mask=row < num_rows)
    tl.store(rank_ptr + row, rank, mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    ids_ptr, rank_ptr, end_ptr, place_ptr, token_ptr, num_rows, k: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < num_rows
    expert = tl.load(ids_ptr + row, mask=inside, other=0)
    before = tl.load(end_ptr + expert - 1, mask=inside & (expert > 0), other=0)
    place = before + tl.load(rank_ptr + row, mask=inside, other=0)
    tl.store(place_ptr + row, place, mask=inside)
    tl.store(token_ptr + place, row // k, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_silu(x_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x_ptr + row * 2 * width + f, mask=f < width, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + f, mask=f < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + f, gate / (1.0 + tl.exp(-gate)) * up, mask=f < width)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(y_ptr, place_ptr, weights_ptr, out_ptr, depth: tl.constexpr, k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for i in tl.static_range(k):
        place = tl.load(place_ptr + token * k + i).to(tl.int64)
        weight = tl.load(weights_ptr + token * k + i)
        total += weight * tl.load(y_ptr + place * depth + d, mask=d < depth, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * depth + d, total, mask=d < depth)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_heads(source_ptr, stride, index_ptr, target_ptr, heads, depth: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, width)
    value = tl.load(source_ptr + row // heads * stride + row % heads * depth + d, mask=d < depth)
    tl.store(target_ptr + tl.load(index_ptr + row) * depth + d, value.to(target_ptr.dtype.element_ty), mask=d < depth)


@triton.jit  # type: ignore[untyped-decorator]
def _expert_product(  # type: ignore[no-untyped-def]
    x_ptr, token_ptr, end_ptr, weight_ptr, out_ptr, depth: tl.constexpr, width: tl.constexpr, gated: tl.constexpr,
    rows: tl.constexpr, outputs: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * outputs + tl.arange(0, outputs)
    first = tl.load(end_ptr + expert - 1, mask=expert > 0, other=0)
    last = tl.load(end_ptr + expert)
    weight = weight_ptr + expert * (2 if gated else 1) * width * depth + n[None, :] * depth
    for top in range(first, last, rows):
        row = top + tl.arange(0, rows)
        inside = row < last
        source = tl.load(token_ptr + row, mask=inside, other=0).to(tl.int64) if gated else row.to(tl.int64)
        y = tl.zeros([rows, outputs], tl.float32)
        up = tl.zeros([rows, outputs], tl.float32)
        for start in range(0, depth, step):
            d = start + tl.arange(0, step)
            known = (d < depth)[:, None] & (n < width)[None, :]
            x = tl.load(x_ptr + source[:, None] * depth + d[None, :], mask=inside[:, None] & (d < depth)[None, :], other=0.0)
            y = tl.dot(x, tl.load(weight + d[:, None], mask=known, other=0.0), y, input_precision="ieee")
            if gated:
                up = tl.dot(x, tl.load(weight + width * depth + d[:, None], mask=known, other=0.0), up, input_precision="ieee")
        if gated:
            y = y / (1.0 + tl.exp(-y)) * up
        where = row.to(tl.int64)[:, None] * width + n[None, :]
        tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < width)[None, :])


class GpuKernels:
    """See `CpuKernels` for what each method computes. Activations and weights have one type; sums are float32."""

    def linear(self, x_TD: Tensor, weight_ND: Tensor) -> Tensor:
        """x @ weight.T."""
        return F.linear(x_TD, weight_ND)

    def rms_norm(self, x_THD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """[T, D] or [T, H, D] with heads side by side."""
        depth = x_THD.shape[-1]
        out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
        num_rows, width = out.numel() // depth, triton.next_power_of_2(depth)
        heads = num_rows // max(1, x_THD.shape[0])
        rows = max(1, ELEMENTS // width)
        if num_rows:
            grid = (triton.cdiv(num_rows, rows),)
            _rms_norm[grid](x_THD, weight_D, out, x_THD.stride(0), eps, num_rows, heads, depth=depth, width=width, rows=rows)
        return out

    def rotate(self, x_THD: Tensor, rotary_T2D: Tensor) -> Tensor:
        """[T, H, D], heads side by side; float32 table."""
        num_tokens, heads, depth = x_THD.shape
        out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
        num_rows, half = num_tokens * heads, triton.next_power_of_2(depth // 2)
        rows = max(1, ELEMENTS // 2 // half)
        if num_rows:
            grid = (triton.cdiv(num_rows, rows),)
            _rotate[grid](x_THD, rotary_T2D, out, x_THD.stride(0), num_rows, heads, depth=depth, half=half, rows=rows)
        return out

    def route(self, logits_TE: Tensor, num_experts_per_tok: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """ids int64 and weights float32, [T, K]; equal logits rank by expert number."""
        (num_tokens, num_experts), k = logits_TE.shape, num_experts_per_tok
        ids_TK = torch.empty(num_tokens, k, dtype=torch.int64, device=logits_TE.device)
        weights_TK = torch.empty(num_tokens, k, dtype=torch.float32, device=logits_TE.device)
        width = max(16, triton.next_power_of_2(num_experts))
        tokens = max(1, 1024 // width)
        sizes = {"num_experts": num_experts, "width": width, "k": k, "k_width": triton.next_power_of_2(k), "tokens": tokens}
        if num_tokens:
            grid = (triton.cdiv(num_tokens, tokens),)
            _route[grid](logits_TE.contiguous(), ids_TK, weights_TK, num_tokens, normalise=normalise, **sizes)
        return ids_TK, weights_TK

    def experts(self, x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Rows sorted by expert (their order within one expert is left open), two grouped products, weighted sum."""
        (num_tokens, k), (num_experts, depth, width) = ids_TK.shape, down_EDF.shape
        num_rows, block = num_tokens * k, 256
        ints = torch.zeros(num_experts + 3 * num_rows, dtype=torch.int32, device=x_TD.device)
        count_E, rank_R, place_R, token_R = torch.split(ints, [num_experts, num_rows, num_rows, num_rows])
        grid = (triton.cdiv(num_rows, block),)
        _rank[grid](ids_TK, rank_R, count_E, num_rows, block=block)
        end_E = count_E.cumsum(0, dtype=torch.int32)
        _place[grid](ids_TK, rank_R, end_E, place_R, token_R, num_rows, k=k, block=block)
        aligned = depth * x_TD.element_size() % 16 == 0 and width * x_TD.element_size() % 16 == 0  # torch's grouped product needs it
        if num_rows <= FEW_ROWS * num_experts or not aligned:
            tile = {"rows": 16, "step": 128, "num_warps": 4, "num_stages": 3}
            hidden_RF, y_RD = x_TD.new_empty(num_rows, width), x_TD.new_empty(num_rows, depth)
            across = triton.cdiv(width, 64), triton.cdiv(depth, 128)
            gate_up = {"depth": depth, "width": width, "gated": True, "outputs": 64}
            down = {"depth": width, "width": depth, "gated": False, "outputs": 128}
            _expert_product[(num_experts, across[0])](x_TD, token_R, end_E, gate_up_EFD, hidden_RF, **gate_up, **tile)
            _expert_product[(num_experts, across[1])](hidden_RF, token_R, end_E, down_EDF, y_RD, **down, **tile)
        else:
            gate_up_RF = F.grouped_mm(x_TD.index_select(0, token_R), gate_up_EFD.mT, offs=end_E)
            hidden_RF = x_TD.new_empty(num_rows, width)
            block = min(1024, triton.next_power_of_2(width))
            _gated_silu[(num_rows, triton.cdiv(width, block))](gate_up_RF, hidden_RF, width=width, block=block)
            y_RD = F.grouped_mm(hidden_RF, down_EDF.mT, offs=end_E)
        out_TD = torch.empty_like(x_TD)
        block = min(1024, triton.next_power_of_2(depth))
        _combine[(num_tokens, triton.cdiv(depth, block))](y_RD, place_R, weights_TK, out_TD, depth=depth, k=k, block=block)
        return out_TD


def copy_heads(source_THD: Tensor, index_N: Tensor, target_ND: Tensor) -> None:
    """target[index[t * H + h]] = source[t, h]; heads side by side."""
    heads, depth = source_THD.shape[1:]
    if len(index_N):
        width = triton.next_power_of_2(depth)
        _copy_heads[(len(index_N),)](source_THD, source_THD.stride(0), index_N, target_ND, heads, depth=depth, width=width, num_warps=1)
