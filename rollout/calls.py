"""One call of the client API: some prompts and where their results go. In: single results. Out: groups in order, events, a future."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from batchgen.outputs import Group, Sample
from batchgen.sampling_params import SamplingParams
from rollout import limits
from rollout.batches import ChatMessage, encode_ids, encode_params
from rollout.client_core import OpenRequest
from rollout.errors import ProtocolError
from rollout.results import Finished, Progress
from rollout.wire import PromptKind

Prompt = list[int] | str | list[dict[str, Any]]
"""Token ids, text, or chat messages."""
ProgressCallback = Callable[[int, int], None]
"""progress(finished samples, all samples)"""


class Call:
    """Collects the results of one generate, stream or submit."""

    def __init__(self, num_prompts: int, num_samples: int, progress: ProgressCallback | None, events: bool):
        self.done: asyncio.Future[list[Group]] = asyncio.get_running_loop().create_future()
        self.requests: list[OpenRequest] = []
        self.events: asyncio.Queue[Progress | Finished | None] | None = asyncio.Queue() if events else None
        self._groups: list[Group | None] = [None] * num_prompts
        self._missing = num_prompts
        self._num_samples = num_samples
        self._num_finished = 0
        self._progress = progress
        self._encoded: dict[int, bytes] = {}
        if not num_prompts:
            self.done.set_result([])

    def encoded(self, params: SamplingParams) -> bytes:
        """The wire form of one of the call's parameters, made once. ProtocolError."""
        found = self._encoded.get(id(params))
        if found is None:
            found = self._encoded[id(params)] = encode_params(params)
        return found

    def progress(self, request: OpenRequest, index: int, start: int, ids: list[int], logprobs: list[float], text: str) -> None:
        if self.events is not None:
            label = request.builder.group.request_id
            event = Progress(
                prompt_index=request.position, request_id=label, index=index, start=start, token_ids=ids, logprobs=logprobs, text=text
            )
            self.events.put_nowait(event)

    def sample(self, request: OpenRequest, sample: Sample, group: Group | None) -> None:
        self._num_finished += 1
        if self.events is not None:
            label = request.builder.group.request_id
            self.events.put_nowait(Finished(prompt_index=request.position, request_id=label, sample=sample, group=group))
        if group is not None:
            self._groups[request.position] = group
            self._missing -= 1
        if self._progress is not None:
            self._progress(self._num_finished, self._num_samples)
        if not self._missing and not self.done.done():
            self.done.set_result([one for one in self._groups if one is not None])

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: whoever awaits gets it, nobody is warned when no one does
        if self.events is not None:
            self.events.put_nowait(None)


def check_params(prompts: list[Prompt], params: SamplingParams | list[SamplingParams] | None) -> list[SamplingParams]:
    """One SamplingParams for each prompt. ValueError when the numbers differ."""
    if not isinstance(params, list):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling params; give one for all or one for each")
    return params


def encode_prompt(prompt: Prompt) -> tuple[PromptKind, bytes]:
    """(kind, bytes) of a prompt. ProtocolError (code `invalid_prompt`) names what is wrong with it."""
    if isinstance(prompt, str):
        kind: PromptKind = "text"
        encoded = prompt.encode("utf-8", "surrogatepass")
    elif _is_chat(prompt):
        kind = "chat"
        try:
            encoded = msgspec.json.encode(msgspec.convert(prompt, list[ChatMessage]))
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"chat messages are dicts with role and content, both text: {error}", code="invalid_prompt") from None
    else:
        kind = "ids"
        encoded = encode_ids(prompt)  # type: ignore[arg-type]
    if kind == "ids" and len(encoded) > limits.MAX_PROMPT_TOKENS * 4:
        raise ProtocolError(f"prompt has {len(encoded) // 4} tokens, the wire takes {limits.MAX_PROMPT_TOKENS}", code="prompt_too_long")
    if kind != "ids" and len(encoded) > limits.MAX_TEXT_BYTES:
        raise ProtocolError(f"prompt has {len(encoded)} bytes of text, the wire takes {limits.MAX_TEXT_BYTES}", code="prompt_too_long")
    return kind, encoded


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def as_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """ValueError for a bare string: it is an iterable of prompts by accident only."""
    if isinstance(prompts, str):
        raise ValueError("prompts is a list of prompts; wrap a single one in a list")
    return list(prompts)
