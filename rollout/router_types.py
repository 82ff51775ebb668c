"""What goes into and comes out of the Router: events and actions. In: nothing. Out: dataclasses."""

from dataclasses import dataclass
from typing import Any

from batchgen.errors import ErrorInfo
from batchgen.outputs import LogprobsMode
from rollout.wire import PromptKind, ResultItem


@dataclass(frozen=True, slots=True)
class ParamsRef:
    """SamplingParams as the client encoded them, shared by all requests that use them."""

    encoded: bytes
    n: int
    logprobs_mode: LogprobsMode


@dataclass(slots=True)
class NewRequest:
    id: int
    kind: PromptKind
    prompt: bytes
    params: ParamsRef
    seed_base: int
    timeout_s: float
    """0: the service's default."""
    stream: bool


@dataclass(slots=True)
class Order:
    """One part for a node."""

    part: int
    kind: PromptKind
    prompt: bytes
    params: ParamsRef
    seed_base: int
    samples: int
    """Bit mask of sample indices."""
    stream: bool


# ---- events ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ClientJoined:
    client: str


@dataclass(slots=True)
class ClientLost:
    client: str


@dataclass(slots=True)
class Submitted:
    client: str
    requests: list[NewRequest]


@dataclass(slots=True)
class Cancelled:
    client: str
    requests: list[int]


@dataclass(slots=True)
class Retired:
    """The client will never ask again about ids below the floor."""

    client: str
    floor: int


@dataclass(slots=True)
class NodeJoined:
    node: str
    window: int
    serving: bool


@dataclass(slots=True)
class NodeServing:
    node: str
    serving: bool


@dataclass(slots=True)
class NodeDraining:
    node: str


@dataclass(slots=True)
class NodeLost:
    node: str
    reason: str


@dataclass(slots=True)
class NodeResults:
    node: str
    items: list[tuple[ResultItem, Any]]
    """(item, body); `request` of the item is the part."""


@dataclass(slots=True)
class AbortedAll:
    pass


@dataclass(slots=True)
class Hold:
    """While on, nothing is assigned."""

    on: bool


@dataclass(slots=True)
class Tick:
    pass


Event = (
    ClientJoined | ClientLost | Submitted | Cancelled | Retired | NodeJoined | NodeServing | NodeDraining | NodeLost | NodeResults
    | AbortedAll | Hold | Tick
)  # fmt: skip

# ---- actions --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Accepted:
    client: str
    requests: list[int]


@dataclass(slots=True)
class Refused:
    client: str
    requests: list[int]
    error: ErrorInfo
    retry_after_s: float


@dataclass(slots=True)
class Repeated:
    """A finished request was submitted again: send its unacknowledged results again, or say that it is finished."""

    client: str
    request: int


@dataclass(slots=True)
class Deliver:
    client: str
    items: list[tuple[ResultItem, Any]]


@dataclass(slots=True)
class AssignParts:
    node: str
    orders: list[Order]


@dataclass(slots=True)
class AbortParts:
    node: str
    parts: list[int]


Action = Accepted | Refused | Repeated | Deliver | AssignParts | AbortParts
