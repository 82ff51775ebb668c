"""Which experts a token meets. In: router logits. Out: expert ids and weights per token. Never sees an expert.

Shapes: T tokens, E experts, K experts per token, G groups of experts.
"""

import torch
from torch import Tensor

from batchgen.arithmetic import Arithmetic
from batchgen.moe.routing import Routing


def route(arithmetic: Arithmetic, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The K best experts of each token, best first: ids_TK int64 and their weights float32. `bias_E`, float32, takes part in the choice
    and not in the weights (DeepSeek-V3)."""
    kernels = arithmetic.kernels
    if kernels is not None and kernels.takes_routing(routing):
        return kernels.route(logits_TE, routing, bias_E)
    ids_TK, weights_TK = arithmetic.tokenwise(_route, logits_TE.float(), routing=routing, bias_E=bias_E)
    return ids_TK, weights_TK


def _route(logits_TE: Tensor, routing: Routing, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    if routing.scoring == "chosen":
        top_TK, ids_TK = logits_TE.topk(routing.num_experts_per_tok, dim=-1)
        return ids_TK, top_TK.softmax(-1) * routing.scale
    scores_TE = logits_TE.softmax(-1) if routing.scoring == "softmax" else logits_TE.sigmoid()
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if routing.num_kept_groups < routing.num_groups:
        ranked_TE = _best_groups(ranked_TE, routing)
    ids_TK = ranked_TE.topk(routing.num_experts_per_tok, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if routing.normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    return ids_TK, weights_TK * routing.scale


def _best_groups(ranked_TE: Tensor, routing: Routing) -> Tensor:
    """Scores, with minus infinity outside each token's best groups."""
    grouped = ranked_TE.view(len(ranked_TE), routing.num_groups, -1)
    best_TG = grouped.topk(routing.group_top, dim=-1).values.sum(-1)
    kept = best_TG.topk(routing.num_kept_groups, dim=-1).indices
    out_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(out_TG.unsqueeze(-1), float("-inf")).view_as(ranked_TE)
