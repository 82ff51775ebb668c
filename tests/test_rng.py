"""Counter-based random numbers: the published function, uniform, and a matter of (seed, position) alone."""

import torch

from batchgen.request import sample_seed
from batchgen.rng import SlotUniforms, philox, seed_words, uniforms

MASK = 0xFFFFFFFF


def python_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in plain integers, as in the paper."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & MASK, low >> 32 ^ c3 ^ k1, low & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def tensor_philox(c0: int, c2: int, seed: int) -> tuple[int, ...]:
    even, odd = philox(keys_of([seed])[..., None], torch.tensor([[[c0]], [[c2]]]))
    return int(even[0]), int(odd[0]), int(even[1]), int(odd[1])


def keys_of(seeds: list[int]) -> torch.Tensor:
    return torch.tensor([seed_words(seed) for seed in seeds]).T


def draw(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return uniforms(keys_of(seeds), torch.tensor(positions)[:, None])[:, 0]


def test_plain_philox_gives_the_published_answers():
    assert python_philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert python_philox((MASK,) * 4, (MASK, MASK)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert python_philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_tensor_philox_is_philox():
    for seed in (0, 1, MASK, 1 << 32, (1 << 64) - 1, 0x0123456789ABCDEF):
        for c0, c2 in ((0, 0), (1, 0), (MASK, 0), (5, 7), (MASK, MASK)):
            assert tensor_philox(c0, c2, seed) == python_philox((c0, 0, c2, 0), (seed & MASK, seed >> 32))


def test_a_uniform_depends_on_its_seed_and_position_alone():
    seeds = [sample_seed(3, i) for i in range(50)]
    positions = [i * i for i in range(50)]
    together = draw(seeds, positions)
    assert torch.equal(together, torch.cat([draw([s], [p]) for s, p in zip(seeds, positions, strict=True)]))
    assert torch.equal(together.flip(0), draw(seeds[::-1], positions[::-1]))
    block = uniforms(keys_of(seeds), torch.arange(60).expand(50, 60))
    assert torch.equal(block[7, 49:50], draw(seeds[7:8], [49]))


def test_the_numbers_of_a_seed_never_change_between_releases():
    first, second, *_ = python_philox((0, 0, 0, 0), (0, 0))
    assert draw([0], [0]).item() == (first << 21 | second >> 11) / 2**53
    assert [x.hex() for x in draw([1, (1 << 64) - 1], [1, 1 << 33]).tolist()] == ["0x1.58102837bf8b9p-1", "0x1.65dfcf188aac4p-1"]


def test_every_bit_of_seed_and_position_matters():
    numbers = draw([0] + [1 << i for i in range(64)] + [0] * 40, [0] * 65 + [1 << i for i in range(40)])
    assert len(set(numbers.tolist())) == len(numbers)


def test_uniforms_cover_the_unit_interval_evenly():
    block = uniforms(keys_of([sample_seed(11, i) for i in range(64)]), torch.arange(1024).expand(64, 1024))
    assert block.dtype == torch.float64 and float(block.min()) >= 0.0 and float(block.max()) < 1.0
    for numbers in (block.flatten(), block[:, 0].repeat(1), block[0]):
        counts = torch.histc(numbers, bins=16, min=0.0, max=1.0)
        expected = len(numbers) / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < 44.3  # chi-square, 15 degrees of freedom, p = 1e-4
    pairs = torch.histc((block[:, :-1] * 8).floor() * 8 + (block[:, 1:] * 8).floor(), bins=64, min=0, max=64)
    expected = block[:, 1:].numel() / 64
    assert float(((pairs - expected) ** 2 / expected).sum()) < 113.0  # 63 degrees of freedom, p = 1e-4


def test_slots_give_the_numbers_of_their_seeds_in_any_order_of_positions():
    slots, seeds = torch.tensor([2, 0, 1]), [sample_seed(1, i) for i in range(3)]
    cached = SlotUniforms(3, "cpu")
    for slot, seed in enumerate(seeds):
        cached.set_slot(slot, seed)
    for positions in ([0, 0, 0], [1, 5, 15], [2, 6, 16], [40, 0, 17], [3, 1 << 33, 1]):
        assert torch.equal(cached.at(slots, torch.tensor(positions)), draw([seeds[2], seeds[0], seeds[1]], positions))
    cached.set_slot(1, 77)
    assert torch.equal(cached.at(slots[2:], torch.tensor([1])), draw([77], [1]))
