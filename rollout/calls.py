"""One call of the client API: some prompts and where their results go. In: single results. Out: groups in order, events, a future."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from batchgen.chat import ChatPrompt, check_messages, check_template_kwargs, check_tools
from batchgen.errors import RequestError
from batchgen.outputs import Group, Sample
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import Prompt, is_chat, misplaced
from rollout import limits
from rollout.batches import encode_ids, encode_params
from rollout.client_core import OpenRequest
from rollout.errors import ProtocolError
from rollout.results import Finished, Progress
from rollout.wire import PromptKind

_Entry = tuple[bytes, list[dict[str, Any]] | None]
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
        self._entries: dict[tuple[int, int, int, bool], tuple[Any, _Entry]] = {}
        self._equal: dict[bytes, bytes] = {}
        if not num_prompts:
            self.done.set_result([])

    def entry(self, params: SamplingParams, asks: "Asks", prompt: Prompt, markers: bool) -> "_Entry":
        """The params entry of one of the call's prompts, and its tools; equal ones are one object. ProtocolError, RequestError."""
        tools, kwargs = asks.tools, asks.template_kwargs
        if isinstance(prompt, ChatPrompt):
            tools = tools if prompt.tools is None else prompt.tools
            kwargs = kwargs if prompt.chat_template_kwargs is None else prompt.chat_template_kwargs
        elif (tools or kwargs) and not is_chat(prompt):
            raise misplaced(prompt, "tools" if tools else "chat_template_kwargs")
        key = (id(params), id(tools), id(kwargs), markers)
        held = self._entries.get(key)
        if held is None:
            checked = check_tools(tools)
            encoded = encode_params(params, checked, check_template_kwargs(kwargs), markers)
            held = self._entries[key] = (params, tools, kwargs), (self._equal.setdefault(encoded, encoded), checked)
        return held[1]

    def all_added(self) -> None:
        """No further entry is asked for: forget the caller's objects."""
        self._entries.clear()
        self._equal.clear()

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


@dataclass(frozen=True, slots=True)
class Asks:
    """What one call says for each of its chats that says nothing itself."""

    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]

    @classmethod
    def check(cls, tools: Any, template_kwargs: Any) -> "Asks":
        """RequestError, before any work, for what no chat could be asked with."""
        return cls(check_tools(tools), check_template_kwargs(template_kwargs))


def encode_prompt(prompt: Prompt) -> tuple[PromptKind, bytes]:
    """(kind, bytes) of a prompt. ProtocolError (code `invalid_prompt`) names what is wrong with it."""
    if isinstance(prompt, str):
        kind: PromptKind = "text"
        encoded = prompt.encode("utf-8", "surrogatepass")
    elif is_chat(prompt):
        kind = "chat"
        try:
            encoded = msgspec.json.encode(check_messages(prompt.messages if isinstance(prompt, ChatPrompt) else prompt))
        except (RequestError, UnicodeEncodeError) as error:
            raise ProtocolError(str(error), code="invalid_prompt") from None
    else:
        kind = "ids"
        encoded = encode_ids(prompt)  # type: ignore[arg-type]
    if kind == "ids" and len(encoded) > limits.MAX_PROMPT_TOKENS * 4:
        raise ProtocolError(f"prompt has {len(encoded) // 4} tokens, the wire takes {limits.MAX_PROMPT_TOKENS}", code="prompt_too_long")
    if kind != "ids" and len(encoded) > limits.MAX_TEXT_BYTES:
        raise ProtocolError(f"prompt has {len(encoded)} bytes of text, the wire takes {limits.MAX_TEXT_BYTES}", code="prompt_too_long")
    return kind, encoded
