"""Counter-based random numbers. In: 64-bit seeds and output positions. Out: one uniform per row; no state, no dependence on other rows.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): key = seed, counter = position. Integer tensor
operations only, so every device gives the same bits.

Shapes: B rows, P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_keys(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Round keys of 64-bit seeds: int64 [rounds, 2, B, 1], each a 32-bit word."""
    words = [[seed & _MASK for seed in seeds], [seed >> 32 & _MASK for seed in seeds]]
    key_2B = torch.tensor(words, dtype=torch.int64).reshape(2, -1)
    step_R = torch.arange(_ROUNDS)
    weyl_R2 = step_R[:, None] * torch.tensor(_WEYL)
    return ((key_2B + weyl_R2[:, :, None]) & _MASK)[..., None].to(device)


def philox(keys: Tensor, counter_2BP: Tensor) -> tuple[Tensor, Tensor]:
    """Philox4x32-10 of counter words (c0, 0, c2, 0), given stacked as (c0, c2). Returns its output as (c0, c2), (c1, c3)."""
    multipliers = torch.tensor(_MULTIPLIERS, device=counter_2BP.device)[:, None, None]
    even, odd = counter_2BP, torch.zeros_like(counter_2BP)
    for round_key in keys:
        product = even.flip(0) * multipliers  # wraps modulo 2**64; both halves of the 64-bit pattern are right
        even = (product >> 32 & _MASK) ^ odd ^ round_key
        odd = product & _MASK
    return even, odd


def uniforms(keys: Tensor, positions_BP: Tensor) -> Tensor:
    """Float64 [B, P] in [0, 1): multiples of 2**-53, a function of the row's seed and the position alone."""
    even, odd = philox(keys, torch.stack([positions_BP & _MASK, positions_BP >> 32]))
    return ((even[0] << 21) | (odd[0] >> 11)).double() * 2.0**-53
