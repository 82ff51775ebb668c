"""The experts' outputs before they are added up. In: rows of outputs. Out: nothing; what takes the sum can do more in the same pass.

Shapes: T tokens, K experts per token, R rows of the expert batch, D model.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class ExpertSum:
    """For each token t: the sum over k of weights[t, k] * y[place[t * K + k]]."""

    y_RD: Tensor
    place_R: Tensor
    """int32"""
    weights_TK: Tensor
    """float32"""

    def total(self) -> Tensor:
        """The sums themselves, [T, D], for what cannot take them in."""
        y_TKD = self.y_RD[self.place_R.long()].view(*self.weights_TK.shape, -1)
        return (y_TKD.float() * self.weights_TK.unsqueeze(-1)).sum(1).to(self.y_RD.dtype)
