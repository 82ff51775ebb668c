"""The public plane's messages. In: header frames, or typed messages. Out: the other. No torch, no I/O.

PROTOCOL.md is the specification; this file is its typed form. A message is one MessagePack header frame (<= 64 KiB, a tagged union,
unknown fields refused) and raw bulk frames whose sizes the header states.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from batchgen.errors import ErrorInfo
from batchgen.events import EngineStats, ModelFacts
from batchgen.outputs import FinishReason, LogprobsMode
from rollout import limits
from rollout.errors import ProtocolError

Count = Annotated[int, Meta(ge=0, le=limits.MAX_REQUEST_ID)]
Id = Annotated[int, Meta(ge=0, le=limits.MAX_REQUEST_ID)]
Ids = Annotated[list[Id], Meta(max_length=limits.MAX_IDS_PER_MESSAGE)]
Uint64 = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
Text = Annotated[str, Meta(max_length=limits.MAX_ERROR_CHARS)]
SessionId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Seconds = Annotated[float, Meta(ge=0, le=limits.MAX_TIMEOUT_S)]
Index = Annotated[int, Meta(ge=0, lt=1024)]
PromptKind = Literal["ids", "text", "chat"]


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Message(msgspec.Struct, tag_field="type", tag=_snake, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of every header: `type` names it, unknown fields are refused."""


# ---- hello and liveness -------------------------------------------------------------------------------------------------


class Hello(Message, kw_only=True):
    """Client → service: first message of a connection. The same session id again resumes the session."""

    version: int
    session: SessionId
    name: Name = ""


class NodeHello(Message, kw_only=True):
    """Node → service: first message of a connection, sent when the model is loaded."""

    version: int
    session: SessionId
    name: Name = ""
    model: ModelFacts
    weights_version: Count
    window: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Samples the node wants outstanding."""


class Welcome(Message, kw_only=True):
    """Service → client or node: the hello was accepted. Sent again, unasked, when the model or its weights version changes."""

    version: int
    service: SessionId
    """Changes when the service restarts: its memory of requests is gone."""
    heartbeat_s: float
    timeout_s: float
    """Silence after which this peer is taken for dead."""
    credits: Count
    """Unfinished requests this client may have."""
    resumed: bool = False
    """Whether the session was known: unacknowledged results follow."""
    model: ModelFacts | None = None
    """None until the first node has joined."""
    weights_version: Count = 0
    serving: bool = True
    """Nodes only. False: the node's weights are not the service's; it gets no work until a weight update brings it level."""
    admin_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port of the admin plane on the same host; 0: none."""


class Ping(Message, kw_only=True):
    sent: float


class Pong(Message, kw_only=True):
    sent: float
    """Copied from the ping."""
    step_age_s: float | None = None
    """Seconds since the engine last finished a step (service: the oldest of its busy nodes). None: nothing to do."""
    stats: EngineStats | None = None
    """Nodes only."""


class Bye(Message, kw_only=True):
    """Either way: this session is over; nothing more will be sent or read."""

    error: ErrorInfo


class Drain(Message, kw_only=True):
    """Node → service: give me no more work. Service → client: no more requests are taken. What runs is finished."""


# ---- requests -----------------------------------------------------------------------------------------------------------


class RequestHead(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One request of a submit message. Its prompt is the next `length` units of the ids frame (int32) or text frame (bytes)."""

    id: Id
    kind: PromptKind
    length: Annotated[int, Meta(ge=0, le=limits.MAX_TEXT_BYTES)]
    params: Annotated[int, Meta(ge=0, lt=limits.MAX_PARAMS_PER_SUBMIT)]
    """Which entry of the params frame."""
    seed_base: Uint64
    timeout_s: Seconds = 0.0
    """0: the service's default."""
    stream: bool = False


class Submit(Message, kw_only=True):
    """Client → service. Frames: params (MessagePack array of SamplingParams), ids (int32), text (UTF-8; chat is JSON)."""

    requests: Annotated[list[RequestHead], Meta(min_length=1, max_length=limits.MAX_REQUESTS_PER_SUBMIT)]


class Accept(Message, kw_only=True):
    """Service → client: these will end in exactly one result per sample."""

    requests: Ids


class Reject(Message, kw_only=True):
    """Service → client: these were not taken and left no trace."""

    requests: Ids
    error: ErrorInfo
    retry_after_s: Seconds = 0.0


class Cancel(Message, kw_only=True):
    """Client → service: end these now; their samples come back with finish_reason abort."""

    requests: Ids


class Ack(Message, kw_only=True):
    """Client → service: every results message up to `seq` arrived, and ids below `floor` will never be asked about again."""

    seq: Count
    floor: Count = 0


class AssignHead(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One part of a request for a node: some samples of one prompt."""

    part: Id
    kind: PromptKind
    length: Annotated[int, Meta(ge=0, le=limits.MAX_TEXT_BYTES)]
    params: Annotated[int, Meta(ge=0, lt=limits.MAX_PARAMS_PER_SUBMIT)]
    seed_base: Uint64
    samples: Annotated[list[tuple[Index, Annotated[int, Meta(ge=1, le=1024)]]], Meta(min_length=1, max_length=512)]
    """Sample indices as half-open ranges [(first, last + 1)]."""
    stream: bool = False


class Assign(Message, kw_only=True):
    """Service → node. Frames as in submit."""

    parts: Annotated[list[AssignHead], Meta(min_length=1, max_length=limits.MAX_REQUESTS_PER_SUBMIT)]


class Abort(Message, kw_only=True):
    """Service → node: end these parts now; samples come back with finish_reason abort."""

    parts: Ids


# ---- results ------------------------------------------------------------------------------------------------------------


class Item(msgspec.Struct, tag_field="item", forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One record of a results message; each has one body frame, in the same order."""

    request: Id
    """Client's request id; between node and service: the part."""


class SampleItem(Item, tag="sample", kw_only=True):
    """The result of one sample. Body: ids int32 [t], logprobs float32 [t], top ids int32 [t, top_k], top logprobs float32 [t, top_k],
    routed experts int16 [routed], text UTF-8 [text_bytes], marked text UTF-8 [marked_bytes]; t = num_tokens."""

    index: Index
    finish_reason: FinishReason
    num_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_OUTPUT_TOKENS)]
    text_bytes: Annotated[int, Meta(ge=0, le=limits.MAX_ITEM_BYTES)]
    seed: Uint64
    logprobs_mode: LogprobsMode
    spans: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=limits.MAX_SPANS)]
    stop_match: str | int | None = None
    detail: Text | None = None
    top_k: Annotated[int, Meta(ge=0, le=64)] = 0
    """Entries per token; id -1 fills a shorter row."""
    routed: tuple[Count, Count, Count] | None = None
    cached_tokens: Count = 0
    error: ErrorInfo | None = None
    marked_bytes: Annotated[int, Meta(ge=0, le=limits.MAX_ITEM_BYTES)] = 0
    """The text with the markers that it hides of the model's message format; only to requests with `markers`, 0 where it hides none."""
    thinking_open: bool = False
    """The prompt ends inside the reasoning; only to requests with `markers`."""


class ProgressItem(Item, tag="progress", kw_only=True):
    """New tokens of a running sample. Body: ids int32 [t], logprobs float32 [t], text UTF-8 [text_bytes]."""

    index: Index
    start: Count
    num_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_OUTPUT_TOKENS)]
    text_bytes: Annotated[int, Meta(ge=0, le=limits.MAX_ITEM_BYTES)]


class PromptItem(Item, tag="prompt", kw_only=True):
    """What the node knows about the prompt; comes before its samples when it was text or chat or its logprobs were asked for.
    Body: ids int32 [t]; when scored: logprobs float32 [t] (the first is NaN), top ids int32 [t, top_k], top logprobs float32 [t, top_k]."""

    num_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_PROMPT_TOKENS)]
    scored: bool = False
    top_k: Annotated[int, Meta(ge=0, le=64)] = 0


ResultItem = SampleItem | ProgressItem | PromptItem


class Results(Message, kw_only=True):
    """Node → service and service → client. One body frame per item."""

    seq: Count
    """Counts a session's results messages from 1; resent after a reconnect until acknowledged. Nodes send 0 and get no ack."""
    items: Annotated[list[ResultItem], Meta(max_length=limits.MAX_ITEMS_PER_RESULTS)]


# ---- questions ----------------------------------------------------------------------------------------------------------


class Query(Message, kw_only=True):
    """Client → service."""

    call: Id
    what: Literal["health", "stats"]


class Answer(Message, kw_only=True):
    """Service → client. Frame: the MessagePack form of results.Health or results.ServiceStats."""

    call: Id


# ---- the weights plane between service and node --------------------------------------------------------------------------


class Control(Message, kw_only=True):
    """Service → node."""

    op: Literal["pause", "resume", "abort_all", "shutdown"]


class Weights(Message, kw_only=True):
    """Either way between service and node: frames are a weights_sync message and its bulk frames."""


FromClient = Hello | Submit | Cancel | Ack | Ping | Pong | Query | Bye
FromNode = NodeHello | Results | Ping | Pong | Drain | Weights | Bye
ToClient = Welcome | Accept | Reject | Results | Ping | Pong | Answer | Drain | Bye
ToNode = Welcome | Assign | Abort | Control | Ping | Pong | Weights | Bye
ToService = Hello | Submit | Cancel | Ack | Ping | Pong | Query | Bye | NodeHello | Results | Drain | Weights

_encoder = msgspec.msgpack.Encoder()


class HeaderDecoder:
    """Decodes header frames into one closed union of message types."""

    def __init__(self, union: Any):
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, frame: Any) -> Any:
        """The typed header. ProtocolError when it is too long, not MessagePack, of an unknown type, or out of range."""
        size = len(frame)
        if size > limits.MAX_HEADER_BYTES:
            raise ProtocolError(f"header has {size} bytes, the limit is {limits.MAX_HEADER_BYTES}; send fewer records per message")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"header is not a message of PROTOCOL.md: {error}") from None


def encode(message: msgspec.Struct) -> bytes:
    """The header frame. ProtocolError above 64 KiB: the sender checks, because an oversize frame only disconnects the peer."""
    frame = _encoder.encode(message)
    if len(frame) > limits.MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {type(message).__name__} has {len(frame)} bytes, the limit is {limits.MAX_HEADER_BYTES}")
    return frame


def cut(text: str) -> str:
    """An error message short enough for the wire."""
    return text if len(text) <= limits.MAX_ERROR_CHARS else text[: limits.MAX_ERROR_CHARS - 1] + "…"


def frame_sizes(frames: Sequence[Any], expected: Sequence[int], what: Sequence[str]) -> None:
    """ProtocolError unless there are exactly these frames with exactly these byte sizes."""
    if len(frames) != len(expected):
        raise ProtocolError(f"message has {len(frames)} bulk frames, its header describes {len(expected)}")
    for frame, size, name in zip(frames, expected, what, strict=True):
        if len(frame) != size:
            raise ProtocolError(f"{name} frame has {len(frame)} bytes, its header describes {size}")
