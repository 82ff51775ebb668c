"""Counter-based random numbers. In: 64-bit seeds and output positions. Out: one uniform per row; no dependence on other rows.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): key = seed, counter = position. Integer tensor
operations only, so every device gives the same bits.

Shapes: S slots, B rows, P positions.
"""

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xCD9E8D57, 0xD2511F53)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_BLOCK = 16
"""Positions computed together by SlotUniforms: one evaluation costs some 100 small operations, whatever its size."""


def seed_words(seed: int) -> list[int]:
    """A 64-bit seed as Philox key words (low, high)."""
    return [seed & _MASK, seed >> 32 & _MASK]


def philox(key_2B1: Tensor, counter_2BP: Tensor) -> tuple[Tensor, Tensor]:
    """Philox4x32-10 of counter words (c0, 0, c2, 0), given stacked as (c0, c2). Returns its output as (c0, c2), (c1, c3).

    All words are 32-bit values in int64 tensors.
    """
    multipliers = torch.tensor(_MULTIPLIERS, device=counter_2BP.device)[:, None, None]
    weyl = torch.tensor(_WEYL, device=counter_2BP.device)[:, None, None]
    even, odd = counter_2BP, torch.zeros_like(counter_2BP)
    for _ in range(_ROUNDS):
        product = even.flip(0) * multipliers  # wraps modulo 2**64; both halves of the 64-bit pattern are right
        even = (product >> 32 & _MASK) ^ odd ^ key_2B1
        odd = product & _MASK
        key_2B1 = key_2B1 + weyl & _MASK
    return even, odd


def uniforms(key_2B: Tensor, positions_BP: Tensor) -> Tensor:
    """Float64 [B, P] in [0, 1): multiples of 2**-53, a function of the row's seed and the position alone."""
    even, odd = philox(key_2B[..., None], torch.stack([positions_BP & _MASK, positions_BP >> 32]))
    return ((even[0] << 21) | (odd[0] >> 11)).double() * 2.0**-53


class SlotUniforms:
    """`uniforms` of slots that hold one seed each; on a CPU computed a block of positions ahead, on a GPU by one kernel."""

    def __init__(self, num_slots: int, device: torch.device | str):
        self._seeds_S = np.zeros(num_slots, np.int64)
        self._seed_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._stale = False
        self._block_S = torch.full((num_slots,), -1, dtype=torch.int64)
        self._uniform_SP = torch.zeros(num_slots, _BLOCK, dtype=torch.float64)

    def set_slot(self, slot: int, seed: int) -> None:
        self._seeds_S[slot] = seed - (seed >> 63 << 64)  # the same 64 bits, signed
        self._block_S[slot] = -1
        self._stale = True

    def seeds(self) -> Tensor:
        """The seeds' bits, int64 [S], at the same place on the device for good."""
        if self._stale:
            self._seed_S.copy_(torch.from_numpy(self._seeds_S))
            self._stale = False
        return self._seed_S

    def at(self, slots_B: Tensor, positions_B: Tensor) -> Tensor:
        """Float64 [B]. A slot may come with several positions."""
        seed_S = self.seeds()
        if seed_S.is_cuda:
            from batchgen.kernels import sampling

            return sampling.uniforms(seed_S, slots_B, positions_B)
        block_B = positions_B // _BLOCK
        stale_B = self._block_S[slots_B] != block_B
        uniform_B = self._uniform_SP[slots_B, positions_B % _BLOCK]
        if bool(stale_B.any()):
            slots_R, block_R = slots_B[stale_B], block_B[stale_B]
            positions_RP = block_R[:, None] * _BLOCK + torch.arange(_BLOCK)
            key_2R = torch.stack([seed_S[slots_R] & _MASK, seed_S[slots_R] >> 32 & _MASK])
            uniform_RP = uniforms(key_2R, positions_RP)
            uniform_B[stale_B] = uniform_RP.gather(1, (positions_B[stale_B] % _BLOCK)[:, None])[:, 0]
            last = torch.tensor(list({slot: row for row, slot in enumerate(slots_R.tolist())}.values()))
            self._uniform_SP[slots_R[last]], self._block_S[slots_R[last]] = uniform_RP[last], block_R[last]
        return uniform_B
