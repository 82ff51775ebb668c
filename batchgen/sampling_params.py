"""How to sample. In: user's wishes. Out: a validated, immutable SamplingParams that is also its own wire form. Never imports torch."""

import math
from typing import Any

import msgspec

from batchgen.outputs import LogprobsMode

MAX_N = 1024
MAX_TOP_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 512
MAX_TOKEN_LIST = 8192
MAX_TOKENS = 1 << 24
MAX_SEED = (1 << 64) - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of one request. Unknown names and values out of range raise (TypeError, ValueError).

    Order of operations: repetition, presence and frequency penalties → logit_bias → allowed_token_ids, bad_words, min_tokens
    masks → temperature → top_k → top_p → min_p → draw. Reported logprobs are taken before all of it (see `logprobs_mode`).
    """

    n: int = 1
    """Samples per prompt, 1..1024."""
    max_tokens: int = 128
    """Most tokens to generate; clamped to the room left in the context."""
    min_tokens: int = 0
    """Stop tokens and EOS cannot be sampled before this many tokens; stop strings are not looked for before it."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. Not negative."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; the top token always survives. 0..1."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the top one. 0..1."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens already in the output. -2..2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output. -2..2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output. > 0."""
    logit_bias: dict[int, float] | None = None
    """token id → value added to its logit, -100..100."""
    allowed_token_ids: list[int] | None = None
    """Only these ids can be sampled."""
    bad_words: list[str] | None = None
    """Strings whose token sequences are never completed."""
    stop: list[str] | None = None
    """Strings that end the sample. A bare string is taken as a list of one when constructed in Python."""
    stop_token_ids: list[int] | None = None
    """Ids that end the sample, besides the model's EOS ids."""
    include_stop: bool = False
    """Keep the stop string, or the stopping token's text, in `text`."""
    ignore_eos: bool = False
    """Do not end at the model's EOS ids."""
    seed: int | None = None
    """Base of the samples' seeds: sample i gets hash(seed, i). None: hash(run seed, request, i)."""
    logprobs: int = 0
    """Also return the k most likely tokens at each output position. 0..64."""
    prompt_logprobs: int | None = None
    """Return prompt tokens' logprobs, with the k most likely at each position. None: not at all."""
    logprobs_mode: LogprobsMode = "processed"
    """`processed`: log_softmax(logits / temperature) (greedy: temperature 1); `raw`: log_softmax(logits)."""
    return_routed_experts: bool = False
    """Return the router's choice per token and layer (router replay in a trainer)."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        if isinstance(self.bad_words, str):
            msgspec.structs.force_setattr(self, "bad_words", [self.bad_words])
        _int("n", self.n, 1, MAX_N)
        _int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _float("temperature", self.temperature, 0.0, 1e6)
        _float("top_p", self.top_p, 0.0, 1.0)
        _int("top_k", self.top_k, 0, 1 << 31)
        _float("min_p", self.min_p, 0.0, 1.0)
        _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _int("seed", self.seed, 0, MAX_SEED)
        if self.prompt_logprobs is not None:
            _int("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.logprobs_mode not in ("processed", "raw"):
            raise ValueError(f"logprobs_mode is 'processed' or 'raw', got {self.logprobs_mode!r}")
        _strings("stop", self.stop)
        _strings("bad_words", self.bad_words)
        _ids("stop_token_ids", self.stop_token_ids)
        _ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be sampled; pass None to allow all")
        if self.logit_bias is not None:
            _ids("logit_bias", list(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _float(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is an integer from {low} to {high}, got {value!r}")


def _float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"{name} is a number from {low:g} to {high:g}, got {value!r}")


def _strings(name: str, values: Any) -> None:
    if values is None:
        return
    if not isinstance(values, list) or len(values) > MAX_STOP_STRINGS:
        raise ValueError(f"{name} is a list of at most {MAX_STOP_STRINGS} strings, got {values!r:.200}")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARS:
            raise ValueError(f"each {name} string has 1 to {MAX_STOP_CHARS} characters, got {value!r:.200}")


def _ids(name: str, values: Any) -> None:
    if values is None:
        return
    if not isinstance(values, list) or len(values) > MAX_TOKEN_LIST:
        raise ValueError(f"{name} holds at most {MAX_TOKEN_LIST} token ids, got {values!r:.200}")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ValueError(f"{name} holds token ids, got {value!r}")
