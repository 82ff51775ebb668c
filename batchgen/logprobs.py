"""Log-probabilities that do not depend on the batch. In: logits and token ids. Out: float32 logprobs. Never samples.

Both modes are taken from the model's own logits, before penalties, masks and filters: `processed` divides by the temperature (greedy:
by 1), `raw` does not.

Shapes: M rows, V vocabulary, K most likely tokens.
"""

import torch
from torch import Tensor

LOWEST_TEMPERATURE = 1e-30
"""Smaller positive temperatures count as this one: float32 logits divided by it stay finite."""
_LOWEST = torch.finfo(torch.float32).min


def log_normalizer(logits_MV: Tensor) -> Tensor:
    """log(sum(exp(logits))) in float64 [M]; NaN where a row has NaN, +inf or nothing but -inf.

    Taken from one softmax, whose CPU kernel works row by row; logsumexp may split one long row over the threads, which would make
    the last bits depend on how many rows there are.
    """
    return logits_MV.amax(1).double() - logits_MV.softmax(1).amax(1).double().log()


def logprobs_of(logits_MV: Tensor, ids: Tensor, normalizer_M: Tensor) -> Tensor:
    """Log-probabilities of ids [M] or [M, K], float32, never below the lowest finite number; NaN where the normalizer is."""
    ids_MK = ids.reshape(len(logits_MV), -1)
    logprobs_MK = logits_MV.gather(1, ids_MK).double() - normalizer_M[:, None]
    return logprobs_MK.clamp(min=_LOWEST).float().reshape(ids.shape)
