"""Sets of sample indices as integer bit masks. In and out: masks, indices, half-open ranges."""

from collections.abc import Iterable, Iterator


def indices(mask: int) -> Iterator[int]:
    """The members, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def lowest(mask: int, count: int) -> int:
    """The `count` smallest members."""
    if mask.bit_count() <= count:
        return mask
    kept = 0
    for _ in range(count):
        low = mask & -mask
        kept |= low
        mask ^= low
    return kept


def ranges(mask: int) -> list[tuple[int, int]]:
    """The members as half-open ranges, ascending."""
    found = []
    start = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        start += skip
        run = (~mask & (mask + 1)).bit_length() - 1
        found.append((start, start + run))
        mask >>= run
        start += run
    return found


def expand(pieces: Iterable[tuple[int, int]]) -> list[int]:
    """The members of half-open ranges."""
    return [index for first, last in pieces for index in range(first, last)]
