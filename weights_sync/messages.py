"""The words of a weight update. In: header frames, or typed messages. Out: checked messages, or header frames. Never imports torch.

PROTOCOL.md tells the exchange; this file is its typed form. Publisher, service and node speak the same words: the service's
coordinator passes them on. A message is one MessagePack header and at most one bulk frame (a tensor table or a bucket).
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from batchgen.errors import ErrorInfo, WeightUpdateError

MAX_HEADER_BYTES = 64 * 1024
MAX_TABLE_BYTES = 64 * 1024 * 1024
"""The bulk frame with names, shapes and dtypes: about a million tensors."""
MAX_NAME_CHARS = 512
MAX_DIMS = 8
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 40
"""Along one dimension; the product is bounded by MAX_TOTAL_BYTES."""
MAX_TOTAL_BYTES = 1 << 43
"""One whole update: 8 TiB."""
MIN_BUCKET_BYTES = 64 * 1024
MAX_BUCKET_BYTES = 64 * 1024 * 1024
MAX_WINDOW = 64
MAX_TIMEOUT_S = 3600.0
MAX_REASONS = 16
"""Reasons listed in one refusal; the last one says how many more there are."""
MAX_REASON_CHARS = 1000
MAX_CODE_CHARS = 128

Policy = Literal["finish", "abort", "continue"]
"""What happens to running samples: they end first under the old weights, they end now with reason `abort`, or they go on under the new."""
WireDtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

UpdateId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
NO_UPDATE = "0" * 16
"""In a `failed` that answers `describe`."""
Version = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
NodeName = Annotated[str, Meta(max_length=128)]
Reasons = Annotated[tuple[Annotated[str, Meta(max_length=MAX_REASON_CHARS)], ...], Meta(max_length=MAX_REASONS + 1)]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: its name in the Hugging Face checkpoint, its shape, and the dtype of its bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=1, le=MAX_ELEMENTS)], ...], Meta(max_length=MAX_DIMS)]
    dtype: WireDtype

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node did in an update."""

    node: NodeName = ""
    """Filled in by the service."""
    stage_s: Seconds
    """Time spent checking and copying into staging memory."""
    paused_s: Seconds = 0.0
    """Time during which no token could be sampled."""


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of every header: `type` names it."""


class Describe(Message):
    """Publisher → service → one node: which tensors does the engine hold?"""


class Table(Message):
    """The answer. Bulk frame: `encode_table` of the engine's tensors."""

    version: Version
    """The one that serves now; the next must be greater."""
    bucket_bytes: Annotated[int, Meta(ge=MIN_BUCKET_BYTES, le=MAX_BUCKET_BYTES)]
    """Size of buckets that the service prefers."""


class Begin(Message):
    """Publisher → service → every node. Bulk frame: `encode_table` of the tensors to come, in this order."""

    update: UpdateId
    version: Version
    policy: Policy
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
    """The whole update, from here to committed. Waiting for running samples (`finish`) counts."""
    bucket_bytes: Annotated[int, Meta(ge=MIN_BUCKET_BYTES, le=MAX_BUCKET_BYTES, multiple_of=64)]


class Ready(Message):
    """Every name, shape and dtype is right on every node; send buckets."""

    update: UpdateId
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
    """Buckets that may be on their way without an `ack`."""


class Bucket(Message):
    """Publisher → service → every node. Bulk frame: bucket `index` of `manifest.plan_buckets`."""

    update: UpdateId
    index: Count
    digest: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """`manifest.digest` of the bulk frame."""


class Ack(Message):
    """Node → service → publisher: this many buckets are staged (everywhere)."""

    update: UpdateId
    count: Count


class Prepared(Message):
    """Node → service: everything is staged and finite; the next word may be commit."""

    update: UpdateId


class Commit(Message):
    """Publisher → service: all buckets are sent, swap when every node is prepared. Service → node: swap now."""

    update: UpdateId


class Abort(Message):
    """Publisher → service → nodes: forget this update; the old version goes on."""

    update: UpdateId
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class Progress(Message):
    """Service → publisher, every few seconds while an update lasts: still here, in this phase."""

    update: UpdateId
    phase: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class Committed(Message):
    """Every later token is sampled by `version`: one report from a node, all nodes' reports to the publisher."""

    update: UpdateId
    version: Version
    nodes: Annotated[tuple[NodeReport, ...], Meta(max_length=1024)]
    lost: Annotated[tuple[NodeName, ...], Meta(max_length=1024)] = ()
    """Nodes that failed after the decision: they serve nothing until an update reaches them."""


class Failed(Message):
    """The update is over and `version` serves as before. Reasons say what was wrong."""

    update: UpdateId
    version: Version
    reasons: Reasons
    code: Annotated[str, Meta(max_length=MAX_CODE_CHARS)] = "weight_update_failed"
    """Stable name of what was wrong: this one, `paused`, or the service's own (`forbidden`)."""
    intact: bool = True
    """Nodes only. False: the weights may be a mixture; the node must not serve."""
    retryable: bool = False
    """Whether the same push may succeed when sent again."""


class Refused(Message):
    """Service → publisher: the last message could not be read or is not allowed with this key."""

    error: ErrorInfo


FromPublisher = Describe | Begin | Bucket | Commit | Abort
ToPublisher = Table | Ready | Ack | Progress | Committed | Failed
FromNode = Table | Ready | Ack | Prepared | Committed | Failed
ToNode = Describe | Begin | Bucket | Commit | Abort

_encoder = msgspec.msgpack.Encoder()
_table_decoder = msgspec.msgpack.Decoder(Annotated[list[TensorEntry], Meta(max_length=MAX_TENSORS)])


class Decoder:
    """Decodes header frames of one closed union, for example `Decoder(FromPublisher)`."""

    def __init__(self, union: Any):
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, frame: Any) -> Any:
        """The typed message. WeightUpdateError (code `protocol_error`) when it is too long, malformed, unknown or out of range."""
        if len(frame) > MAX_HEADER_BYTES:
            raise WeightUpdateError(f"header has {len(frame)} bytes, the limit is {MAX_HEADER_BYTES}", code="protocol_error")
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WeightUpdateError(f"header is not a message of weights_sync/PROTOCOL.md: {error}", code="protocol_error") from None


def encode(message: Message) -> bytes:
    """The header frame."""
    return _encoder.encode(message)


def encode_table(entries: Iterable[TensorEntry]) -> bytes:
    """A tensor table as a bulk frame: a MessagePack array of [name, shape, dtype]. WeightUpdateError above the limit."""
    frame = _encoder.encode(list(entries))
    if len(frame) > MAX_TABLE_BYTES:
        raise WeightUpdateError(f"the tensor table has {len(frame)} bytes, the limit is {MAX_TABLE_BYTES}; stack the experts' tensors")
    return frame


def decode_table(frame: Any) -> list[TensorEntry]:
    """The entries. WeightUpdateError when the frame is too long or an entry is out of range."""
    if len(frame) > MAX_TABLE_BYTES:
        raise WeightUpdateError(f"the tensor table has {len(frame)} bytes, the limit is {MAX_TABLE_BYTES}", code="protocol_error")
    try:
        entries = _table_decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WeightUpdateError(f"the tensor table is malformed: {error}", code="protocol_error") from None
    if (total := sum(entry.num_bytes for entry in entries)) > MAX_TOTAL_BYTES:
        raise WeightUpdateError(f"the tensors have {total} bytes together, the limit is {MAX_TOTAL_BYTES}", code="protocol_error")
    return entries


def new_update_id() -> str:
    """A fresh update id."""
    return secrets.token_hex(8)


def short(reasons: Sequence[str]) -> tuple[str, ...]:
    """Reasons that fit in a message: long ones are cut, many are counted."""
    cut = [r if len(r) <= MAX_REASON_CHARS else r[: MAX_REASON_CHARS - 1] + "…" for r in reasons[:MAX_REASONS]]
    return (*cut, f"and {len(reasons) - MAX_REASONS} more") if len(reasons) > MAX_REASONS else tuple(cut)


def table_of(specs: Mapping[str, Any]) -> list[TensorEntry]:
    """Entries of an engine's specs: anything with `.shape` and `.dtype` by name."""
    return [TensorEntry(name, tuple(spec.shape), spec.dtype) for name, spec in specs.items()]
