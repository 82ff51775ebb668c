"""One unit of work for the engine: a prompt and which of its samples to make. Never imports torch."""

import hashlib

import msgspec

from batchgen.sampling_params import SamplingParams


class Request(msgspec.Struct, kw_only=True):
    """Samples `sample_indices` of one prompt. Several nodes may each hold a part of one group."""

    request_id: str
    """Unique within the engine while the request lives."""
    prompt_token_ids: list[int]
    params: SamplingParams
    sample_indices: list[int]
    """Usually 0..n-1; a re-run or a split group holds a subset."""
    seed_base: int
    """64 bits; sample i's seed is `sample_seed(seed_base, i)`. See `seed_base`."""
    stream: bool = False
    """Emit SampleProgress events at every decision boundary."""


def seed_base(run_seed: int, request_key: str, params: SamplingParams) -> int:
    """Base of a request's seeds: the user's `params.seed`, else hash(run seed, request key)."""
    return params.seed if params.seed is not None else _hash64(f"{run_seed}/{request_key}")


def sample_seed(base: int, index: int) -> int:
    """64-bit seed of sample `index`; all samples of a group differ."""
    return _hash64(f"{base}#{index}")


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
