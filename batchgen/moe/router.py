"""Which experts a token meets. In: router logits. Out: expert ids and weights per token. Never sees an expert.

Shapes: T tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from batchgen.arithmetic import Arithmetic


def route(arithmetic: Arithmetic, logits_TE: Tensor, num_experts_per_tok: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The K most likely experts of each token, most likely first: ids_TK int64 and their probabilities float32, scaled to sum to 1 when
    `normalise`. The softmax is over all experts."""
    if arithmetic.kernels is not None:
        return arithmetic.kernels.route(logits_TE, num_experts_per_tok, normalise)
    weights_TK, ids_TK = torch.softmax(logits_TE.float(), dim=-1).topk(num_experts_per_tok, dim=-1)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK
