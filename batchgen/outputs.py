"""What a generation returns. In: finished sequences. Out: Sample and Group. Never imports torch."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from batchgen.errors import ErrorInfo

if TYPE_CHECKING:
    import numpy as np

    from batchgen.text.message import Message

FinishReason = Literal["stop", "length", "abort", "error"]
LogprobsMode = Literal["processed", "raw"]


class Reply(msgspec.Struct, kw_only=True, frozen=True):
    """What a sample's message is read from."""

    format: str
    """The model's message format, one of `batchgen.text.parsers.formats.FORMATS`."""
    tools: list[dict[str, Any]] | None
    """The request's, to type arguments by."""
    thinking_open: bool
    """Whether the prompt ends inside the reasoning."""
    text: str | None
    """The text with the format's markers, where `Sample.text` hides some."""


class Sample(msgspec.Struct, kw_only=True, dict=True):
    """One completion. Every per-token list has exactly `len(token_ids)` entries."""

    index: int
    """Which of the group's n samples this is, 0-based."""
    token_ids: list[int]
    """Sampled ids, the stopping token or the tokens of the stop string included."""
    logprobs: list[float]
    """float32 log-probability of each sampled id, in the group's `logprobs_mode`."""
    text: str
    """The ids decoded; cut before the stop string unless `include_stop`."""
    finish_reason: FinishReason
    stop_match: str | int | None = None
    """The stop string or token id that ended the sample; None for the other reasons."""
    detail: str | None = None
    """Why, where the reason alone does not say (for example: max_tokens was clamped to the context)."""
    seed: int
    """64-bit seed of this sample's random numbers."""
    weights_versions: list[tuple[int, int, int]]
    """(version, start, end): output tokens start..end-1 were sampled by these weights."""
    top_logprobs: list[dict[int, float]] | None = None
    """Per token the k most likely ids, most likely first (`SamplingParams.logprobs = k`)."""
    routed_experts: "np.ndarray | None" = None
    """int16 [prompt + output - 1, MoE layers, experts per token]: the router's choice for every position that was computed."""
    error: ErrorInfo | None = None
    """Set exactly when finish_reason is `error`."""
    reply: Reply | None = None
    """What `message` is read from; None where that is not known."""

    @cached_property
    def message(self) -> "Message | None":
        """The sample as an assistant's message: content, reasoning_content and tool_calls. Parsed on first use.

        None for errors and where the model folder has no tokenizer. In a format without reasoning or tools it is plain content. Calls
        without ids of the model's own are named by the sample's seed, so that no two turns of a conversation share one.
        """
        if self.reply is None:
            return None
        from batchgen.text.message import MessageParser

        prefix = f"call_{self.seed:016x}_"
        parser = MessageParser(self.reply.format, self.reply.tools, self.reply.thinking_open, call_prefix=prefix)
        parser.feed(self.text if self.reply.text is None else self.reply.text)
        parser.finish()
        return parser.message


class Group(msgspec.Struct, kw_only=True):
    """All samples of one prompt, in index order."""

    request_id: str
    prompt_token_ids: list[int]
    samples: list[Sample]
    logprobs_mode: LogprobsMode
    """`processed`: log_softmax(logits / temperature); `raw`: log_softmax(logits). Both before penalties, masks and filters."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache instead of being computed."""
    prompt_logprobs: list[float | None] | None = None
    """Log-probability of each prompt id given those before it; the first is None."""
    prompt_top_logprobs: list[dict[int, float]] | None = None
    """The k most likely ids at each prompt position (`prompt_logprobs = k > 0`); the first is empty."""


class GroupBuilder:
    """Collects one request's results, in any order, into a Group."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], n: int, logprobs_mode: LogprobsMode):
        self.group = Group(request_id=request_id, prompt_token_ids=prompt_token_ids, samples=[], logprobs_mode=logprobs_mode)
        self._samples: list[Sample | None] = [None] * n
        self.missing = n
        """Samples still to come."""

    def add(self, sample: Sample, num_cached_tokens: int = 0) -> bool:
        """Keep a sample; a second one with the same index is ignored. Returns whether the group is complete."""
        if self._samples[sample.index] is None:
            self._samples[sample.index] = sample
            self.missing -= 1
            self.group.num_cached_tokens = max(self.group.num_cached_tokens, num_cached_tokens)
        if self.missing == 0:
            self.group.samples = [s for s in self._samples if s is not None]
        return self.missing == 0

    def absent(self) -> list[int]:
        """Indices of the samples still to come."""
        return [i for i, sample in enumerate(self._samples) if sample is None]
