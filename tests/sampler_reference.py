"""What one row's sampling means, written for the eye: numpy, float64, one row at a time. In: logits and parameters. Out: the distribution.

Not a test file: the sampler's tests compare with it.
"""

from dataclasses import dataclass

import numpy as np

from batchgen.sampling_params import SamplingParams


@dataclass
class Row:
    """A sequence as the reference sees it."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    outputs: list[int]
    eos: list[int]
    bad_words: list[list[int]]


def adjusted_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """Penalties, bias and masks."""
    p, x = row.params, logits.astype(np.float64).copy()
    for token in set(row.prompt) | set(row.outputs):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(row.outputs):
        x[token] -= p.presence_penalty + p.frequency_penalty * row.outputs.count(token)
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    for word in row.bad_words:
        prefix = word[:-1]
        if row.outputs[len(row.outputs) - len(prefix) :] == prefix:
            x[word[-1]] = -np.inf
    if len(row.outputs) < p.min_tokens:
        x[[*row.eos, *(p.stop_token_ids or [])]] = -np.inf
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def reported(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The logprobs a reply shows."""
    scale = params.temperature if params.logprobs_mode == "processed" and not params.greedy else 1.0
    return log_softmax(logits.astype(np.float64) / scale)


def candidates(logits: np.ndarray, row: Row, slack: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(ids in draw order, their probabilities). `slack` moves the cut-offs of top_p and min_p by a relative amount."""
    p = row.params
    x = adjusted_logits(logits, row)
    order = np.argsort(-x, kind="stable")
    if p.greedy:
        return order[:1], np.ones(1)
    probs = softmax(x / p.temperature)
    keep = order[: p.top_k] if 0 < p.top_k < len(x) else order
    if p.top_p < 1.0:
        mass = np.cumsum(probs[keep] / probs[keep].sum())
        keep = keep[: int(np.searchsorted(mass, p.top_p * (1.0 + slack))) + 1]
    keep = keep[probs[keep] >= p.min_p * (1.0 + slack) * probs[keep[0]]] if p.min_p * (1.0 + slack) <= 1.0 else keep[:1]
    if not (0 < p.top_k < len(x)) and p.top_p == 1.0:
        keep = np.sort(keep)
    return keep, probs[keep] / probs[keep].sum()


def is_right_draw(token: int, uniform: float, logits: np.ndarray, row: Row) -> bool:
    """Whether the inverse CDF at `uniform` is `token`, give or take float32 rounding at the borders."""
    for slack in (0.0, 1e-5, -1e-5):
        ids, probs = candidates(logits, row, slack)
        if token in ids:
            at = int(np.flatnonzero(ids == token)[0])
            upper = np.cumsum(probs)
            if probs[at] > 0.0 and upper[at] - probs[at] - 1e-5 <= uniform <= upper[at] + 1e-5:
                return True
    return False
