"""The admin plane's messages. In: header frames, or typed messages. Out: the other. No torch, no I/O.

Two families share the admin socket: calls (ours, below: one answer each, matched by `call`) and the words of weights_sync/PROTOCOL.md,
which travel as they are. Both name themselves in `type`.
"""

from typing import Annotated

from msgspec import Meta

from batchgen.errors import ErrorInfo
from rollout.limits import MAX_TIMEOUT_S
from rollout.wire import Count, Id, Message
from weights_sync import messages as weights


class _Call(Message, kw_only=True):
    call: Id


class Pause(_Call, kw_only=True):
    """Nodes stop device work after the running step; requests are still taken."""


class Resume(_Call, kw_only=True):
    """Undo pause."""


class AbortAll(_Call, kw_only=True):
    """End every request of every client; samples come back with finish_reason abort."""


class Shutdown(_Call, kw_only=True):
    """Take no more requests, finish what runs for at most drain_s, then stop nodes and service."""

    drain_s: Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)] = 0.0


class GetHealth(_Call, kw_only=True):
    """Answered by `answer` with results.Health. Roles admin and metrics."""


class GetStats(_Call, kw_only=True):
    """Answered by `answer` with results.ServiceStats. Roles admin and metrics."""


class Done(_Call, kw_only=True):
    """The operation was carried out; how many nodes were told."""

    nodes: Count = 0


class AdminAnswer(_Call, kw_only=True):
    """Frame: the MessagePack form of results.Health or results.ServiceStats."""


class Failure(_Call, kw_only=True):
    """The call was refused."""

    error: ErrorInfo


AdminCall = Pause | Resume | AbortAll | Shutdown | GetHealth | GetStats
READ_ONLY = (GetHealth, GetStats)
ToAdmin = AdminCall | weights.FromPublisher
FromAdmin = Done | AdminAnswer | Failure | weights.Refused | weights.ToPublisher
