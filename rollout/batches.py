"""Many prompts in one message. In: encoded prompts with parameters, or received frames. Out: the other. No I/O.

The frames of submit and assign: params (MessagePack array of SamplingParams), ids (int32, all id prompts one after the other),
text (UTF-8, all text and chat prompts one after the other).
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from batchgen.chat import Message, check_template_kwargs, check_tools
from batchgen.errors import BatchGenError
from batchgen.sampling_params import SamplingParams
from rollout import limits
from rollout.errors import ProtocolError
from rollout.wire import AssignHead, PromptKind, RequestHead, frame_sizes

ID_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_raw_list = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=limits.MAX_PARAMS_PER_SUBMIT)])
_NOTHING = msgspec.Raw()


class ChatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What goes with a chat prompt, and whether results are to be read as messages; only a node looks inside."""

    tools: msgspec.Raw = _NOTHING
    template_kwargs: msgspec.Raw = _NOTHING
    markers: bool = False
    """Send what a sample's message is read from."""


class RequestParams(SamplingParams, frozen=True, kw_only=True):
    """One entry of the params frame: SamplingParams, and `chat` where chat prompts need more than their messages."""

    chat: ChatOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A params entry, unpacked."""

    params: SamplingParams
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    markers: bool = False


_params = msgspec.msgpack.Decoder(RequestParams)
_chat = msgspec.json.Decoder(Annotated[list[Message], Meta(min_length=1, max_length=limits.MAX_CHAT_MESSAGES)])


class Batch:
    """Collects prompts for one message until one of the message's limits is reached."""

    def __init__(self) -> None:
        self.count = 0
        self._header_bytes = 0
        self._prompt_bytes = 0
        self._params_bytes = 0
        self._params: dict[bytes, int] = {}
        self._ids: list[bytes] = []
        self._text: list[bytes] = []

    def add(self, kind: PromptKind, prompt: bytes, params: bytes, head_bytes: int = 64) -> int | None:
        """Index of the params entry, or None when the prompt does not fit any more (never on an empty batch)."""
        new_params = params not in self._params
        if self.count and (
            self.count == limits.MAX_REQUESTS_PER_SUBMIT
            or self._header_bytes + head_bytes > limits.TARGET_HEADER_BYTES
            or self._prompt_bytes + len(prompt) > limits.TARGET_MESSAGE_BYTES
            or (new_params and len(self._params) == limits.MAX_PARAMS_PER_SUBMIT)
            or (new_params and self._params_bytes + len(params) > limits.MAX_PARAMS_BYTES // 2)
        ):
            return None
        if new_params:
            self._params[params] = len(self._params)
            self._params_bytes += len(params)
        (self._ids if kind == "ids" else self._text).append(prompt)
        self.count += 1
        self._header_bytes += head_bytes
        self._prompt_bytes += len(prompt)
        return self._params[params]

    def frames(self) -> list[bytes]:
        params = _encoder.encode([msgspec.Raw(encoded) for encoded in self._params])
        return [params, b"".join(self._ids), b"".join(self._text)]


def prompt_length(kind: PromptKind, prompt: bytes) -> int:
    """The `length` of a head."""
    return len(prompt) // ID_BYTES if kind == "ids" else len(prompt)


def split(heads: Sequence[RequestHead] | Sequence[AssignHead], frames: Sequence[Any]) -> tuple[list[bytes], Iterator[bytes]]:
    """(encoded params, prompts in order). ProtocolError when frames and heads disagree or a limit is passed; nothing was copied then."""
    ids_bytes = sum(head.length for head in heads if head.kind == "ids") * ID_BYTES
    text_bytes = sum(head.length for head in heads if head.kind != "ids")
    if ids_bytes + text_bytes > limits.MAX_SUBMIT_BYTES:
        raise ProtocolError(f"prompts have {ids_bytes + text_bytes} bytes, one message takes {limits.MAX_SUBMIT_BYTES}; send several")
    for head in heads:
        if head.kind == "ids" and head.length > limits.MAX_PROMPT_TOKENS:
            raise ProtocolError(f"a prompt has {head.length} tokens, the wire takes {limits.MAX_PROMPT_TOKENS}")
    params_bytes = len(frames[0]) if frames else 0
    if params_bytes > limits.MAX_PARAMS_BYTES:
        raise ProtocolError(f"params frame has {params_bytes} bytes, the limit is {limits.MAX_PARAMS_BYTES}")
    frame_sizes(frames, (params_bytes, ids_bytes, text_bytes), ("params", "ids", "text"))
    try:
        params = [bytes(raw) for raw in _raw_list.decode(frames[0])]
    except (msgspec.MsgspecError, RecursionError) as error:
        what = f"an array of at most {limits.MAX_PARAMS_PER_SUBMIT} SamplingParams"
        raise ProtocolError(f"params frame is not {what}: {error}") from None
    if any(head.params >= len(params) for head in heads):
        raise ProtocolError(f"params frame has {len(params)} entries; each head's index is among them")
    return params, _prompts(heads, frames)


def _prompts(heads: Sequence[RequestHead] | Sequence[AssignHead], frames: Sequence[Any]) -> Iterator[bytes]:
    ids, text = memoryview(frames[1]), memoryview(frames[2])
    ids_at = text_at = 0
    for head in heads:
        if head.kind == "ids":
            yield bytes(ids[ids_at : (ids_at := ids_at + head.length * ID_BYTES)])
        else:
            yield bytes(text[text_at : (text_at := text_at + head.length)])


def encode_params(
    params: SamplingParams, tools: list[dict[str, Any]] | None = None, template_kwargs: dict[str, Any] | None = None, markers: bool = False
) -> bytes:
    """An entry of the params frame. ProtocolError when the parameters alone are too long for a message."""
    fields: SamplingParams | dict[str, Any] = params
    if tools or template_kwargs or markers:
        options = {"tools": tools, "template_kwargs": template_kwargs, "markers": markers}
        options = {name: value for name, value in options.items() if value}
        fields = {**msgspec.to_builtins(params), "chat": options}
    encoded = _encoder.encode(fields)
    if len(encoded) > limits.MAX_PARAMS_BYTES // 2:
        raise ProtocolError(f"sampling parameters have {len(encoded)} bytes, the limit is {limits.MAX_PARAMS_BYTES // 2}")
    return encoded


def decode_params(encoded: bytes) -> SamplingParams:
    """The checked sampling parameters of an entry; what goes with a chat is not opened. ProtocolError names the field."""
    return _sampling(_entry(encoded))


def decode_asked(encoded: bytes) -> Asked:
    """All of an entry, checked. ProtocolError with the code of what is wrong."""
    entry = _entry(encoded)
    chat = entry.chat or ChatOptions()
    try:
        tools, kwargs = check_tools(_open(chat.tools)), check_template_kwargs(_open(chat.template_kwargs))
        return Asked(params=_sampling(entry), tools=tools, template_kwargs=kwargs, markers=chat.markers)
    except BatchGenError as error:
        raise ProtocolError(error.message, code=error.code) from None


def _entry(encoded: bytes) -> RequestParams:
    try:
        return _params.decode(encoded)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"sampling parameters are invalid: {error}", code="invalid_params") from None


def _sampling(entry: RequestParams) -> SamplingParams:
    return msgspec.convert(entry, SamplingParams, from_attributes=True)


def _open(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.msgpack.decode(raw) if len(memoryview(raw)) else None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"tools and template_kwargs are plain values: {error}", code="invalid_params") from None


def encode_ids(token_ids: Sequence[int]) -> bytes:
    """int32 bytes. ProtocolError for ids that are not 32-bit integers."""
    try:
        return array("i", token_ids).tobytes()
    except (OverflowError, TypeError):
        raise ProtocolError(f"a prompt is a flat list of 32-bit token ids, got {str(token_ids)[:80]}", code="invalid_prompt") from None


def decode_ids(prompt: bytes) -> list[int]:
    ids: list[int] = memoryview(prompt).cast("i").tolist()
    return ids


def decode_chat(prompt: bytes) -> list[Message]:
    """Chat messages. ProtocolError when it is not a JSON array of them or too long."""
    try:
        return _chat.decode(prompt)
    except (msgspec.MsgspecError, RecursionError) as error:
        what = f"a JSON array of 1 to {limits.MAX_CHAT_MESSAGES} messages"
        raise ProtocolError(f"a chat prompt is {what}: {error}", code="invalid_prompt") from None
