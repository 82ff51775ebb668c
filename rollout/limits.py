"""Every bound on what a peer may send or make us hold. In: nothing. Out: wire limits (fixed) and ServiceLimits (configurable).

A wire limit is checked before anything is parsed or allocated; tests/test_wire_limits.py tries each at the limit and one above.
"""

from dataclasses import dataclass, fields

PROTOCOL_VERSION = 1

MAX_HEADER_BYTES = 64 * 1024
"""A MessagePack header frame."""
MAX_FRAMES = 1024
"""Frames after the header in one message."""
MAX_REQUESTS_PER_SUBMIT = 1024
"""Requests in one submit or assign message."""
MAX_PARAMS_PER_SUBMIT = 64
"""Different SamplingParams in one submit or assign message."""
MAX_PARAMS_BYTES = 1024 * 1024
"""The params frame of one submit or assign message."""
MAX_PROMPT_TOKENS = 1 << 20
"""Token ids in one prompt."""
MAX_TEXT_BYTES = 4 * 1024 * 1024
"""UTF-8 bytes of one text or chat prompt."""
MAX_SUBMIT_BYTES = 16 * 1024 * 1024
"""All prompt frames of one submit or assign message together."""
MAX_ITEMS_PER_RESULTS = 1024
"""Samples, progress pieces and prompt records in one results message."""
MAX_ITEM_BYTES = 64 * 1024 * 1024
"""Body of one result item, and one bulk frame of the weights plane."""
MAX_OUTPUT_TOKENS = 1 << 24
"""Output tokens of one sample."""
MAX_SPANS = 1024
"""Weights-version spans of one sample."""
MAX_IDS_PER_MESSAGE = 4096
"""Request ids in one cancel, accept or abort message."""
MAX_CHAT_MESSAGES = 1024
"""Messages of one chat prompt."""
MAX_NAME_CHARS = 128
"""Names of peers, error codes."""
MAX_ERROR_CHARS = 2000
"""An error message; longer ones are cut by the sender."""
MAX_TIMEOUT_S = 7 * 86400.0
"""Deadline of one request, in seconds."""
MAX_REQUEST_ID = (1 << 63) - 1
"""Request ids are counted by the client from 0."""

# Sizes a sender aims at, well under the limits above.
TARGET_HEADER_BYTES = 48 * 1024
TARGET_MESSAGE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits:
    """What one service holds for its peers, and how long it waits for them."""

    max_clients: int = 256
    """Client sessions at a time."""
    max_nodes: int = 64
    """Nodes at a time."""
    max_queued_requests: int = 1 << 20
    """Unfinished requests of all clients together."""
    max_queued_bytes: int = 1 << 30
    """Bytes of prompts and parameters of all unfinished requests together."""
    credits: int = 16384
    """Unfinished requests one client may have; told in welcome."""
    outbox_bytes: int = 256 * 1024 * 1024
    """Unsent and unacknowledged bytes held for one peer; above it the peer is disconnected with the reason slow_reader."""
    heartbeat_s: float = 2.0
    """Seconds between two pings."""
    client_timeout_s: float = 30.0
    """A client silent for this long is gone: its work is aborted and its memory freed."""
    reconnect_grace_s: float = 5.0
    """A client whose connection is closed has this long to come back."""
    node_timeout_s: float = 15.0
    """A node silent for this long is lost: its unfinished samples go elsewhere."""
    engine_stall_s: float = 180.0
    """A node whose engine has work but finished no step for this long is lost as well."""
    no_node_grace_s: float = 60.0
    """Requests wait this long for a node after the last serving one was lost or set aside, then end in the error no_nodes."""
    default_timeout_s: float = 3600.0
    """Deadline of a request that names none, from its acceptance."""
    retry_after_s: float = 0.5
    """Advice in a reject for want of room."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} is positive, got {value}")
