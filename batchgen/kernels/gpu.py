"""What a decoder computes on a GPU, small operations fused in Triton. In: CUDA tensors. Out: CUDA tensors. Never waits for the device.

The interface is that of `batchgen.kernels.cpu.CpuKernels`; dense products are cuBLAS's.

Shapes: T tokens, K experts per token, E experts, D model or head size, F expert width, H heads, X outputs of a fused projection, N outputs
or rows of the KV cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from batchgen.kernels import delta
from batchgen.kernels.experts import experts
from batchgen.moe.activation import SILU, Activation
from batchgen.moe.expert_sum import ExpertSum
from batchgen.moe.routing import Routing
from batchgen.packing import Spans

ELEMENTS = 2048
"""Values that one program handles at a time."""


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
def _add_norm(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, place_ptr, weights_ptr, gains_ptr, sum_ptr, out_ptr, eps, num_rows,
    k: tl.constexpr, depth: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    d = tl.arange(0, width)
    inside = (row < num_rows)[:, None] & (d < depth)[None, :]
    where = row[:, None] * depth + d[None, :]
    x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    if k == 0:
        x += tl.load(delta_ptr + where, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(k):
        place = tl.load(place_ptr + row * k + i, mask=row < num_rows, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + row * k + i, mask=row < num_rows, other=0.0)
        x += weight[:, None] * tl.load(delta_ptr + place[:, None] * depth + d[None, :], mask=inside, other=0.0).to(tl.float32)
    stored = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + where, stored, mask=inside)
    x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / depth + eps)
    gains = tl.load(gains_ptr + d, mask=d < depth, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, (x * scale[:, None] * gains[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _place_heads(  # type: ignore[no-untyped-def]
    qkv_ptr, q_norm_ptr, k_norm_ptr, table_ptr, slot_ptr, q_ptr, k_ptr, v_ptr, eps, num_rows, num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr, normalise: tl.constexpr, depth: tl.constexpr, half: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    token, head = row // (num_heads + 2 * num_kv_heads), row % (num_heads + 2 * num_kv_heads)
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    d = tl.arange(0, half)
    known = d < depth // 2
    inside = (row < num_rows)[:, None] & known[None, :]
    where = row[:, None] * depth + d[None, :]
    low = tl.load(qkv_ptr + where, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + where + depth // 2, mask=inside, other=0.0).to(tl.float32)
    first, second = low, high
    if normalise:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / depth + eps)[:, None]
        q_low, q_high = tl.load(q_norm_ptr + d, mask=known, other=0.0), tl.load(q_norm_ptr + depth // 2 + d, mask=known, other=0.0)
        k_low, k_high = tl.load(k_norm_ptr + d, mask=known, other=0.0), tl.load(k_norm_ptr + depth // 2 + d, mask=known, other=0.0)
        first *= scale * tl.where(is_q[:, None], q_low[None, :], k_low[None, :]).to(tl.float32)
        second *= scale * tl.where(is_q[:, None], q_high[None, :], k_high[None, :]).to(tl.float32)
    angle = (token * 2 * depth)[:, None] + d[None, :]
    cos = tl.load(table_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(table_ptr + angle + depth + depth // 2, mask=inside, other=0.0)
    turned = tl.where(is_v[:, None], low, first * cos - second * sin).to(q_ptr.dtype.element_ty)
    turned_high = tl.where(is_v[:, None], high, second * cos + first * sin).to(q_ptr.dtype.element_ty)
    kv_head = tl.where(is_v, head - num_heads - num_kv_heads, head - num_heads)
    is_kv = (row < num_rows) & ~is_q
    slot = tl.load(slot_ptr + token * num_kv_heads + kv_head, mask=is_kv, other=0)
    q_where = (token * num_heads + head)[:, None] * depth + d[None, :]
    kv_where = slot[:, None] * depth + d[None, :]
    q_inside, k_inside, v_inside = inside & is_q[:, None], inside & (is_kv & ~is_v)[:, None], inside & is_v[:, None]
    tl.store(q_ptr + q_where, turned, mask=q_inside)
    tl.store(q_ptr + q_where + depth // 2, turned_high, mask=q_inside)
    tl.store(k_ptr + kv_where, turned, mask=k_inside)
    tl.store(k_ptr + kv_where + depth // 2, turned_high, mask=k_inside)
    tl.store(v_ptr + kv_where, turned, mask=v_inside)
    tl.store(v_ptr + kv_where + depth // 2, turned_high, mask=v_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _keep_groups(  # type: ignore[no-untyped-def]
    ranked, num_groups: tl.constexpr, kept: tl.constexpr, top: tl.constexpr, tokens: tl.constexpr, width: tl.constexpr
):
    """Minus infinity outside each token's best groups: those with the highest sum of their `top` (1 or 2) best."""
    size: tl.constexpr = width // num_groups
    grouped = tl.reshape(ranked, [tokens, num_groups, size])
    total = tl.max(grouped, 2)
    if top == 2:
        first = tl.argmax(grouped, 2, tie_break_left=True)
        rest = tl.where(tl.arange(0, size)[None, None, :] == first[:, :, None], float("-inf"), grouped)
        total += tl.max(rest, 2)
    group = tl.arange(0, num_groups)
    chosen = tl.zeros([tokens, num_groups], tl.int32)
    for _ in tl.static_range(kept):
        here = group[None, :] == tl.argmax(total, 1, tie_break_left=True)[:, None]
        chosen = tl.where(here, 1, chosen)
        total = tl.where(here, float("-inf"), total)
    grouped = tl.where(chosen[:, :, None] > 0, grouped, float("-inf"))
    return tl.reshape(grouped, [tokens, width])


@triton.jit(do_not_specialize=["num_tokens", "factor"])  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, num_tokens, factor, sigmoid: tl.constexpr, normalise: tl.constexpr,
    num_groups: tl.constexpr, kept: tl.constexpr, group_top: tl.constexpr, num_experts: tl.constexpr, width: tl.constexpr,
    k: tl.constexpr, k_width: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    token, expert, place = tl.program_id(0) * tokens + tl.arange(0, tokens), tl.arange(0, width), tl.arange(0, k_width)
    known = (expert < num_experts)[None, :]
    inside = (token < num_tokens)[:, None]
    logits = tl.load(logits_ptr + token[:, None] * num_experts + expert[None, :], mask=inside & known, other=0.0).to(tl.float32)
    if sigmoid:
        p = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(known, logits, float("-inf"))
        p = tl.exp(logits - tl.max(logits, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    left = p
    if bias_ptr is not None:
        left += tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0)[None, :]
    if kept < num_groups:
        left = _keep_groups(left, num_groups, kept, group_top, tokens, width)
    left = tl.where(known, left, float("-inf"))
    ids, weights = tl.zeros([tokens, k_width], tl.int32), tl.zeros([tokens, k_width], tl.float32)
    for i in tl.static_range(k):
        best = tl.minimum(tl.argmax(left, 1, tie_break_left=True), num_experts - 1)
        here = expert[None, :] == best[:, None]
        ids = tl.where(place[None, :] == i, best[:, None], ids)
        weights = tl.where(place[None, :] == i, tl.sum(tl.where(here, p, 0.0), 1)[:, None], weights)
        left = tl.where(here, float("-inf"), left)
    if normalise:
        weights = weights / (tl.sum(weights, 1)[:, None] + (1e-20 if sigmoid else 0.0))
    where = token[:, None] * k + place[None, :]
    tl.store(ids_ptr + where, ids.to(tl.int64), mask=inside & (place < k)[None, :])
    tl.store(weights_ptr + where, weights * factor, mask=inside & (place < k)[None, :])


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

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | ExpertSum, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        num_rows, depth = x_TD.shape
        sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        width = triton.next_power_of_2(depth)
        rows = max(1, ELEMENTS // width)
        sizes = {"depth": depth, "width": width, "rows": rows}
        if not num_rows:
            return sum_TD, out_TD
        grid = (triton.cdiv(num_rows, rows),)
        if isinstance(delta_TD, Tensor):
            _add_norm[grid](x_TD, delta_TD, None, None, weight_D, sum_TD, out_TD, eps, num_rows, k=0, **sizes)
        else:
            y_RD, place_R, weights_TK = delta_TD.y_RD, delta_TD.place_R, delta_TD.weights_TK
            k = weights_TK.shape[1]
            _add_norm[grid](x_TD, y_RD, place_R, weights_TK, weight_D, sum_TD, out_TD, eps, num_rows, k=k, **sizes)
        return sum_TD, out_TD

    def place_heads(
        self,
        qkv_TX: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rotary_T2D: Tensor,
        head_slots_N: Tensor,
        k_ND: Tensor,
        v_ND: Tensor,
    ) -> Tensor:
        """Split a fused projection (contiguous): norm and rotate its q and k heads, write k and v to rows `head_slots_N` of a layer's KV;
        returns q [T, H, D]. `norms`: the heads' gains for q and k."""
        num_tokens, depth = len(qkv_TX), k_ND.shape[1]
        num_kv_heads = len(head_slots_N) // max(1, num_tokens)
        num_heads = qkv_TX.shape[1] // depth - 2 * num_kv_heads
        q_THD = qkv_TX.new_empty(num_tokens, num_heads, depth)
        num_rows, half = num_tokens * (num_heads + 2 * num_kv_heads), triton.next_power_of_2(depth // 2)
        rows = max(1, ELEMENTS // 2 // half)
        if num_tokens:
            q_norm_D, k_norm_D = norms or (None, None)
            sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "depth": depth, "half": half, "rows": rows}
            _place_heads[(triton.cdiv(num_rows, rows),)](
                qkv_TX, q_norm_D, k_norm_D, rotary_T2D, head_slots_N, q_THD, k_ND, v_ND, eps, num_rows, normalise=norms is not None, **sizes
            )
        return q_THD

    def convolve(self, x_TC: Tensor, taps_CW: Tensor, states: Tensor, spans: Spans) -> Tensor:
        """See `batchgen.kernels.delta`."""
        return delta.convolve(x_TC, taps_CW, states, spans)

    def delta_rule(
        self, q_THD: Tensor, k_THD: Tensor, v_TNV: Tensor, log_decay: Tensor, beta_TN: Tensor, states: Tensor, spans: Spans
    ) -> Tensor:
        """See `batchgen.kernels.delta`."""
        return delta.delta_rule(q_THD, k_THD, v_TNV, log_decay, beta_TN, states, spans)

    def takes_routing(self, routing: Routing) -> bool:
        """All but groups whose sizes are not powers of two, or that count more than two of their best."""
        sizes = (routing.num_groups, routing.num_experts // routing.num_groups)
        return routing.num_kept_groups == routing.num_groups or (routing.group_top <= 2 and all(size.bit_count() == 1 for size in sizes))

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids int64 and weights float32, [T, K]; equal logits rank by expert number."""
        (num_tokens, num_experts), k = logits_TE.shape, routing.num_experts_per_tok
        ids_TK = torch.empty(num_tokens, k, dtype=torch.int64, device=logits_TE.device)
        weights_TK = torch.empty(num_tokens, k, dtype=torch.float32, device=logits_TE.device)
        width = max(16, triton.next_power_of_2(num_experts))
        tokens = max(1, 1024 // width)
        sizes = {"num_experts": num_experts, "width": width, "k": k, "k_width": triton.next_power_of_2(k), "tokens": tokens}
        groups = {"num_groups": routing.num_groups, "kept": routing.num_kept_groups, "group_top": routing.group_top}
        # a softmax over the chosen ones is one over all, normalised
        kind = {"sigmoid": routing.scoring == "sigmoid", "normalise": routing.normalise or routing.scoring == "chosen"}
        if num_tokens:
            grid = (triton.cdiv(num_tokens, tokens),)
            where = (logits_TE.contiguous(), bias_E, ids_TK, weights_TK, num_tokens)
            _route[grid](*where, routing.scale, **kind, **groups, **sizes)
        return ids_TK, weights_TK

    def experts(
        self,
        x_TD: Tensor,
        gate_up_EFD: Tensor,
        down_EDF: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        activation: Activation = SILU,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> ExpertSum:
        """Sorted and multiplied: see `batchgen.kernels.experts`."""
        return experts(x_TD, gate_up_EFD, down_EDF, ids_TK, weights_TK, activation, biases)
