"""What Engine.step() reports. In: nothing. Out: event types. Never imports torch."""

from dataclasses import dataclass

import msgspec

from batchgen.outputs import Sample


@dataclass(slots=True, kw_only=True)
class SampleProgress:
    """New tokens of a running sample; only for requests with `stream=True`."""

    request_id: str
    index: int
    start: int
    """Position in the output of the first token here."""
    token_ids: list[int]
    logprobs: list[float]
    text: str
    """Text that became certain: whole characters, nothing that could still be part of a stop string."""


@dataclass(slots=True, kw_only=True)
class SampleFinished:
    """The one and only result of a sample."""

    request_id: str
    sample: Sample
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the group was prefilled."""


@dataclass(slots=True, kw_only=True)
class PromptScored:
    """Prompt logprobs of a request that asked for them; comes before its first SampleFinished."""

    request_id: str
    prompt_logprobs: list[float | None]
    prompt_top_logprobs: list[dict[int, float]] | None


@dataclass(slots=True, kw_only=True)
class WeightsCommitted:
    """The staged weights are live; every later token is sampled by `version`."""

    version: int
    paused_s: float
    """Seconds during which no token could be sampled."""


Event = SampleProgress | SampleFinished | PromptScored | WeightsCommitted


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What clients need to know about the served model."""

    name: str
    architecture: str
    fingerprint: str
    """Hex digest of config.json and the safetensors headers."""
    vocab_size: int
    """Valid token ids are 0..vocab_size-1 (the tokenizer's range when the checkpoint's is padded beyond it)."""
    max_model_len: int
    eos_token_ids: list[int]
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    dtype: str
    deterministic: bool
    message_format: str | None = None
    """How the model writes reasoning and tool calls (`batchgen.text.parsers.formats.FORMATS`); None without a tokenizer."""


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters since start and gauges of now. Times in seconds."""

    weights_version: int = 0
    waiting: int = 0
    running: int = 0
    held: int = 0
    pages_total: int = 0
    pages_used: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt or recomputed tokens that went through the model."""
    output_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed by speculation, and how many of them the model sampled."""
    accepted_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    weight_updates: int = 0
    update_paused_s: float = 0.0
    finished: dict[str, int] = {}
    """finish_reason → samples."""
