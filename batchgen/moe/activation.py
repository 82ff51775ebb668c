"""How a feed-forward layer gates. In: gates and ups. Out: hidden values. Never multiplies by a weight."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Activation:
    """`silu`: silu(gate) * up (Shazeer 2020). `clamped`: gate at most b and up within -b..b, then gate * sigmoid(a * gate) * (up + 1)
    (GPT-OSS). `limited`: the same clamps, then silu(gate) * up (GLM-5.3-Flash). `situ`: a * tanh(gate / a) * sigmoid(gate) * b *
    tanh(up / b) (Kimi-K3)."""

    kind: Literal["silu", "clamped", "situ", "limited"] = "silu"
    a: float = 0.0
    b: float = 0.0


SILU = Activation()


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Activation of [..., 2F], all gates, then all ups; [..., F] in the same type."""
    gates, ups = gate_up.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gates) * ups
    a, b = activation.a, activation.b
    if activation.kind in ("clamped", "limited"):
        gates, ups = gates.clamp(max=b), ups.clamp(-b, b)
        return gates * torch.sigmoid(a * gates) * (ups + 1) if activation.kind == "clamped" else F.silu(gates) * ups
    wide, up = gates.float(), ups.float()
    return (a * torch.tanh(wide / a) * torch.sigmoid(wide) * b * torch.tanh(up / b)).to(gate_up.dtype)
