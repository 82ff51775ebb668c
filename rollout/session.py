"""The service's side of one client session. In: result items, acks, reconnects. Out: results messages to send. No I/O, no clock of its own.

Results messages are numbered from 1 and kept until acknowledged, so that a client that reconnects misses nothing.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from rollout import limits
from rollout.wire import ResultItem, Results, encode

ITEM_OVERHEAD = 16
_measure = msgspec.msgpack.Encoder()

Frames = list[Any]


class Session:
    """Numbering, batching and retention of one client's results."""

    def __init__(self, key: str, user: str, name: str, peer: bytes, now: float):
        self.key = key
        self.user = user
        """CURVE public key it said hello with; the session belongs to it."""
        self.name = name
        self.peer: bytes | None = peer
        """Routing id of its connection; None while it has none."""
        self.last_seen = now
        self.lost_at: float | None = None
        """When its connection was found closed."""
        self.unacked_bytes = 0
        self._unacked: deque[tuple[int, Frames, int, frozenset[int]]] = deque()
        self._next_seq = 1

    def pack(self, items: Iterable[tuple[ResultItem, Any]]) -> list[Frames]:
        """Number and keep items as few results messages; returns them for sending."""
        messages: list[Frames] = []
        batch: list[ResultItem] = []
        bodies: Frames = []
        header_bytes = body_bytes = 0
        for item, body in items:
            size = len(_measure.encode(item)) + ITEM_OVERHEAD
            full = header_bytes + size > limits.TARGET_HEADER_BYTES or len(batch) == limits.MAX_ITEMS_PER_RESULTS
            if batch and (full or body_bytes + len(body) > limits.TARGET_MESSAGE_BYTES):
                messages.append(self._keep(batch, bodies, body_bytes))
                batch, bodies, header_bytes, body_bytes = [], [], 0, 0
            batch.append(item)
            bodies.append(body)
            header_bytes += size
            body_bytes += len(body)
        if batch:
            messages.append(self._keep(batch, bodies, body_bytes))
        return messages

    def ack(self, seq: int) -> None:
        """Forget messages up to seq."""
        while self._unacked and self._unacked[0][0] <= seq:
            self.unacked_bytes -= self._unacked.popleft()[2]

    def unacked(self) -> list[Frames]:
        """Everything the client has not confirmed, oldest first."""
        return [frames for _, frames, _, _ in self._unacked]

    def holding(self, request: int) -> list[Frames]:
        """Unconfirmed messages with results of one request."""
        return [frames for _, frames, _, requests in self._unacked if request in requests]

    def connect(self, peer: bytes, now: float) -> None:
        self.peer, self.last_seen, self.lost_at = peer, now, None

    def disconnect(self, now: float) -> None:
        self.peer = None
        if self.lost_at is None:
            self.lost_at = now

    def gone(self, now: float, timeout_s: float, grace_s: float) -> bool:
        """Whether the client must be taken for dead."""
        return now - self.last_seen > timeout_s or (self.lost_at is not None and now - self.lost_at > grace_s)

    def _keep(self, batch: list[ResultItem], bodies: Frames, body_bytes: int) -> Frames:
        header = encode(Results(seq=self._next_seq, items=batch))
        frames = [header, *bodies]
        size = len(header) + body_bytes
        self._unacked.append((self._next_seq, frames, size, frozenset(item.request for item in batch)))
        self.unacked_bytes += size
        self._next_seq += 1
        return frames
