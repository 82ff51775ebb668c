"""What the coordinator is told and what it asks for. In: nothing. Out: event and action types. Never imports torch."""

from dataclasses import dataclass
from typing import Any

from weights_sync import messages as m

Peer = bytes
"""A publisher's address on the admin plane, opaque here."""


# ---- events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublisherSaid:
    peer: Peer
    message: m.FromPublisher
    data: Any = None
    """The bulk frame, if any."""


@dataclass(frozen=True, slots=True)
class PublisherLeft:
    peer: Peer


@dataclass(frozen=True, slots=True)
class NodeJoined:
    node: str
    version: int


@dataclass(frozen=True, slots=True)
class NodeLeft:
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeSaid:
    node: str
    message: m.FromNode
    data: Any = None


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing runs on any node; the answer to HoldDispatch."""


@dataclass(frozen=True, slots=True)
class HeldByPause:
    """Generation is paused and running samples are held, so HoldDispatch has no end until somebody resumes."""

    samples: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; send one at least every second while an update lasts."""


Event = PublisherSaid | PublisherLeft | NodeJoined | NodeLeft | NodeSaid | Drained | HeldByPause | Tick


# ---- actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPublisher:
    peer: Peer
    message: m.ToPublisher
    data: Any = None


@dataclass(frozen=True, slots=True)
class SendNode:
    node: str
    message: m.ToNode
    data: Any = None


@dataclass(frozen=True, slots=True)
class HoldDispatch:
    """Give nodes no new work; say Drained once nothing runs."""


@dataclass(frozen=True, slots=True)
class ReleaseDispatch:
    """Give nodes work again."""


@dataclass(frozen=True, slots=True)
class SetServing:
    """Whether a node may be given work, and why not."""

    node: str
    serving: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VersionChanged:
    """The service's weights version from now on."""

    version: int


Action = SendPublisher | SendNode | HoldDispatch | ReleaseDispatch | SetServing | VersionChanged
