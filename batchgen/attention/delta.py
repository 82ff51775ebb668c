"""The gated delta rule and what goes before it, in plain torch. In: a packed batch's activations, states. Out: outputs; states move on.

Each sequence carries a matrix S [K, V] per head instead of keys and values (Gated DeltaNet, Yang et al. 2024; Kimi Linear, 2025):
S <- exp(g) S, then S <- S + beta k (v - S^T k)^T, and the output is S^T q. `recurrent` goes token by token; `chunked` takes `CHUNK` tokens
at a time, where what a token writes depends on the others of its chunk only through a triangular system.

Shapes: T tokens, B sequences, H heads, G value heads per key head, N = H G, K key size, V value size, C channels, W taps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.packing import Spans

CHUNK = 32
"""Tokens; within a chunk decays are divided by each other, so it is kept short."""


def convolve(x_TC: Tensor, taps_CW: Tensor, states: Tensor, spans: Spans) -> Tensor:
    """silu of a causal convolution per channel, float32 [T, C]. `states` [., C, W - 1]: last inputs, oldest first; updated."""
    x_TC = x_TC.float()
    past_BCW = _load(states, spans)
    if _one_each(spans):
        window_BCW = torch.cat((past_BCW, x_TC.unsqueeze(2)), dim=2)
        states[spans.state_B] = window_BCW[..., 1:]
        return F.silu((window_BCW * taps_CW).sum(-1))
    outputs, pasts = [], []
    for past_CW, x_tC in zip(past_BCW, _split(x_TC, spans), strict=True):
        line_Ct = torch.cat((past_CW, x_tC.T), dim=1)
        pasts.append(line_Ct[:, line_Ct.shape[1] - past_CW.shape[1] :])
        windows_CtW = line_Ct.unfold(1, taps_CW.shape[1], 1)
        outputs.append((windows_CtW * taps_CW.unsqueeze(1)).sum(-1).T)
    states[spans.state_B] = torch.stack(pasts)
    return F.silu(torch.cat(outputs))


def log_decay(x_THK: Tensor, rate_H: Tensor, bias_HK: Tensor, bound: float | None) -> Tensor:
    """-exp(rate) * softplus(x + bias), or bound * sigmoid(exp(rate) * (x + bias)); float32."""
    grown_H1, x_THK = rate_H.exp().unsqueeze(1), x_THK.float() + bias_HK
    return -grown_H1 * F.softplus(x_THK) if bound is None else bound * torch.sigmoid(grown_H1 * x_THK)


def delta_rule(
    q_THK: Tensor, k_THK: Tensor, v_TNV: Tensor, log_decay: Tensor, beta_TN: Tensor, states: Tensor, spans: Spans, *, exact: bool
) -> Tensor:
    """float32 [T, N, V]. `log_decay` [T, N, K], or [T, N] for all K alike; `states` [., N, K, V]: updated. `exact`: token by token, so that
    results do not depend on how a sequence is cut."""
    groups = v_TNV.shape[1] // q_THK.shape[1]
    q_TNK, k_TNK = (x.float().repeat_interleave(groups, dim=1) for x in (q_THK, k_THK))
    decay_TNK = log_decay.float() if log_decay.dim() == 3 else log_decay.float().unsqueeze(2).expand_as(q_TNK)
    inputs = (q_TNK, k_TNK, v_TNV.float(), decay_TNK, beta_TN.float())
    state_BNKV = _load(states, spans)
    if _one_each(spans):
        out_B1NV, states[spans.state_B] = recurrent([x.unsqueeze(1) for x in inputs], state_BNKV)
        return out_B1NV.squeeze(1)
    form = recurrent if exact else chunked
    outputs, ends = [], []
    for state_NKV, *parts in zip(state_BNKV, *(_split(x, spans) for x in inputs), strict=True):
        out_1tNV, end_1NKV = form([part.unsqueeze(0) for part in parts], state_NKV.unsqueeze(0))
        outputs.append(out_1tNV[0])
        ends.append(end_1NKV[0])
    states[spans.state_B] = torch.stack(ends)
    return torch.cat(outputs)


def recurrent(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: q, k [B, t, N, K], v [B, t, N, V], log decay [B, t, N, K], beta [B, t, N], state [B, N, K, V]; outputs and the
    last state."""
    q, k, v, decay, beta = inputs
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t].exp().unsqueeze(-1)
        seen = (state * k[:, t].unsqueeze(-1)).sum(-2)
        change = (v[:, t] - seen) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, dim=1), state


def chunked(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """As `recurrent`, by products of matrices.

    With G_t the sum of a chunk's log decays up to t, and changes d_t = beta_t (v_t - S^T k_t) at their time, all changes solve
    (I + A) d = beta (v - (k exp(G)) S_0), A_ts = beta_t sum_K k_t k_s exp(G_t - G_s) for s < t.
    """
    q, k, v, decay, beta = inputs
    outputs = []
    for start in range(0, q.shape[1], CHUNK):
        q_c, k_c, v_c, g_c = (x[:, start : start + CHUNK].transpose(1, 2) for x in (q, k, v, decay))
        beta_c = beta[:, start : start + CHUNK].transpose(1, 2).unsqueeze(-1)
        total = g_c.cumsum(2)
        between = (total.unsqueeze(3) - total.unsqueeze(2)).exp()  # [B, N, t, s, K]; above the diagonal it may overflow, and is cut off
        size = q_c.shape[2]
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        between = torch.where(lower.unsqueeze(-1), between, 0.0)
        of_keys = (k_c.unsqueeze(3) * between * k_c.unsqueeze(2)).sum(-1).tril(-1)
        of_queries = (q_c.unsqueeze(3) * between * k_c.unsqueeze(2)).sum(-1)
        wanted = beta_c * (v_c - (k_c * total.exp()) @ state)
        unit = torch.eye(size, device=q.device)
        change = torch.linalg.solve_triangular(unit + beta_c * of_keys, wanted, upper=False, unitriangular=True)
        outputs.append((q_c * total.exp()) @ state + of_queries @ change)
        left = total[:, :, -1:]
        state = state * left.transpose(2, 3).exp() + (k_c * (left - total).exp()).transpose(2, 3) @ change
    return torch.cat(outputs, dim=2).transpose(1, 2), state


def _one_each(spans: Spans) -> bool:
    return spans.starts[-1] == len(spans.starts) - 1


def _split(x_T: Tensor, spans: Spans) -> tuple[Tensor, ...]:
    return torch.split(x_T, [end - start for start, end in zip(spans.starts, spans.starts[1:], strict=False)])


def _load(states: Tensor, spans: Spans) -> Tensor:
    loaded = states[spans.state_B]
    return torch.where(spans.fresh_B.bool().view(-1, *[1] * (loaded.dim() - 1)), 0.0, loaded)
