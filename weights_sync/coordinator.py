"""One weight update over all nodes, as a state machine. In: events and the time. Out: actions. Sans I/O: no sockets, no clock, no torch.

IDLE → CHECKING (nodes compare the table) → SENDING (buckets pass through) → DRAINING (policy finish: running samples end)
     → COMMITTING (decided: nodes swap) → IDLE. Every way out of the first three phases leaves the old version serving everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from weights_sync import messages as m
from weights_sync.events import (
    Action,
    Drained,
    Event,
    HeldByPause,
    HoldDispatch,
    NodeJoined,
    NodeLeft,
    NodeSaid,
    Peer,
    PublisherLeft,
    PublisherSaid,
    ReleaseDispatch,
    SendNode,
    SendPublisher,
    SetServing,
    Tick,
    VersionChanged,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """How much an update may hold and how long it may wait."""

    bucket_bytes: int = 4 * 1024 * 1024
    """Bucket size told to publishers. At 16 MB and more every hop pays page faults for fresh memory (measured: half the speed)."""
    window: int = 16
    """Buckets on their way at a time: the service holds at most window x bucket_bytes."""
    silence_s: float = 10.0
    """Longest wait for the peer whose turn it is, before the decision."""
    commit_s: float = 30.0
    """Longest wait for nodes to swap, after the decision."""
    progress_s: float = 2.0
    """Seconds between two signs of life to the publisher."""


PROBE_S = 0.4
"""Time for the word that probes a publisher's connection to come back as undeliverable."""
DEFAULT_CODE = "weight_update_failed"


def held_by_pause(samples: int) -> str:
    """Why policy finish is refused while generation is paused."""
    return (
        f"generation is paused and {samples} unfinished samples are held at the nodes, so policy finish would wait for ever; "
        "resume first, or push with policy continue (they go on under the new weights) or abort"
    )


def _in_progress(update: "_Update") -> str:
    return f"the update to version {update.begin.version} is in progress; push again when it has ended"


# ---- state --------------------------------------------------------------------------------------------------------------


class Phase(Enum):
    CHECKING = "nodes check the tensor table"
    SENDING = "tensors are on their way"
    DRAINING = "waiting for running samples to end (policy finish)"
    COMMITTING = "nodes swap the weights"


@dataclass(slots=True)
class _Node:
    version: int | None
    """None: unknown after a failed swap, perhaps a mixture."""
    serving: bool | None = None
    """None: the service was not told yet."""
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A begin that came during an update whose publisher may be dead."""

    peer: Peer
    begin: m.Begin
    table: Any
    since: float


@dataclass(slots=True)
class _Update:
    peer: Peer
    begin: m.Begin
    ends_at: float
    heard_at: float
    """When the last expected word came; silence is counted from here."""
    spoke_at: float
    """When the publisher spoke last."""
    told_at: float
    waiting: set[str]
    """Nodes whose ready (CHECKING) or end of swap (COMMITTING) is awaited."""
    acks: dict[str, int]
    """Buckets staged, by participating node."""
    phase: Phase = Phase.CHECKING
    num_buckets: int = 0
    acked: int = 0
    prepared: set[str] = field(default_factory=set)
    commit_asked: bool = False
    reports: list[m.NodeReport] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Nodes that failed after the decision, and why."""


class Coordinator:
    """Feed it every event of the service; carry out the actions in order."""

    def __init__(self, limits: CoordinatorLimits | None = None):
        self.limits = limits or CoordinatorLimits()
        self.version: int | None = None
        """None until the first node has joined."""
        self._nodes: dict[str, _Node] = {}
        self._update: _Update | None = None
        self._next: _Waiting | None = None
        self._last: m.Begin | None = None
        """The last update that was decided."""
        self._asking: dict[Peer, str] = {}
        """Publishers waiting for a table, and the node that was asked."""

    @property
    def busy(self) -> bool:
        """Whether an update is in progress."""
        return self._update is not None

    @property
    def phase(self) -> Phase | None:
        return self._update.phase if self._update else None

    def is_serving(self, node: str) -> bool:
        """Whether this node holds the service's version and may be given work."""
        return node in self._nodes and bool(self._nodes[node].serving)

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one door: every change of state happens here."""
        out: list[Action] = []
        match event:
            case PublisherSaid(peer, message, data):
                if self._update is not None and self._update.peer == peer:
                    self._update.spoke_at = now
                self._publisher_said(peer, message, data, now, out)
            case NodeSaid(node, message, data):
                self._node_said(node, message, data, now, out)
            case PublisherLeft(peer):
                self._asking.pop(peer, None)
                if self._next is not None and self._next.peer == peer:
                    self._drop_next("the publisher's connection was lost", out)
                if self._update and self._update.peer == peer and not self._update.commit_asked:
                    self._fail(["the publisher's connection was lost"], out, retryable=True)
            case NodeJoined(node, version):
                self._joined(node, version, out)
            case NodeLeft(node, reason):
                self._left(node, reason, now, out)
            case Drained():
                if self._update and self._update.phase is Phase.DRAINING:
                    self._decide(now, out)
            case HeldByPause(samples):
                if self._update and self._update.phase is Phase.DRAINING:
                    self._fail([held_by_pause(samples)], out, code="paused")
            case Tick():
                self._check_deadlines(now, out)
                self._answer_next(now, out)
        if self._next is not None and self._update is None:
            following, self._next = self._next, None
            self._begin(following.peer, following.begin, following.table, now, out)
        return out

    # ---- publisher ------------------------------------------------------------------------------------------------------

    def _publisher_said(self, peer: Peer, message: m.FromPublisher, data: Any, now: float, out: list[Action]) -> None:
        if isinstance(message, m.Describe):
            self._describe(peer, out)
        elif isinstance(message, m.Begin):
            self._begin(peer, message, data, now, out)
        elif self._next is not None and self._next.peer == peer and self._next.begin.update == message.update:
            self._drop_next("the publisher gave up, or went on without waiting for ready", out)
        elif self._update is None or self._update.peer != peer or self._update.begin.update != message.update:
            if isinstance(message, m.Commit):
                self._refuse(peer, message.update, "this update is over or was never begun; push again", out)
        elif isinstance(message, m.Bucket):
            self._bucket(message, data, now, out)
        elif isinstance(message, m.Commit):
            self._update.commit_asked = True
            self._update.heard_at = now
            self._try_prepare(now, out)
        elif self._update.phase is not Phase.COMMITTING:
            self._fail([f"the publisher gave up: {message.reason}"], out)

    def _describe(self, peer: Peer, out: list[Action]) -> None:
        node = next(iter(self._nodes), None)
        if node is None:
            self._refuse(peer, m.NO_UPDATE, "no node has joined the service yet; try again when one has", out, retryable=True)
            return
        if node not in self._asking.values():
            out.append(SendNode(node, m.Describe()))
        self._asking[peer] = node

    def _begin(self, peer: Peer, begin: m.Begin, table: Any, now: float, out: list[Action]) -> None:
        def refuse(reason: str, retryable: bool = False) -> None:
            self._refuse(peer, begin.update, reason, out, retryable)

        if self._update is not None:
            if self._next is not None or self._update.peer == peer or self._update.phase is Phase.COMMITTING:
                refuse(_in_progress(self._update), retryable=True)
                return
            # A trainer that was killed and started again meets its own update: this word shows whether the old connection still exists.
            self._next = _Waiting(peer, begin, table, now)
            out.append(SendPublisher(self._update.peer, m.Progress(update=self._update.begin.update, phase=self._update.phase.value)))
        elif not self._nodes or self.version is None:
            refuse("no node has joined the service; push again when one has", retryable=True)
        elif begin.version <= self.version:
            refuse(f"version {begin.version} is not greater than {self.version}, which serves now; number the pushes upwards")
        elif table is None or len(table) > m.MAX_TABLE_BYTES:
            refuse(f"begin needs one bulk frame, the tensor table, of at most {m.MAX_TABLE_BYTES} bytes")
        else:
            nodes = list(self._nodes)
            self._update = _Update(
                peer=peer,
                begin=begin,
                ends_at=now + begin.timeout_s,
                heard_at=now,
                spoke_at=now,
                told_at=now,
                waiting=set(nodes),
                acks=dict.fromkeys(nodes, 0),
            )
            out += [SendNode(node, begin, table) for node in nodes]

    def _answer_next(self, now: float, out: list[Action]) -> None:
        """Refuse a waiting begin unless the publisher before it is silent although it is its turn: then it soon ends by its deadline."""
        update, following = self._update, self._next
        if update is None or following is None or now < following.since + PROBE_S:
            return
        its_turn = update.phase is Phase.SENDING and not update.commit_asked and update.acked == update.num_buckets
        if its_turn and update.spoke_at <= following.since and now < following.since + following.begin.timeout_s:
            out.append(SendPublisher(following.peer, m.Progress(update=following.begin.update, phase=_in_progress(update))))
        else:
            self._drop_next(_in_progress(update), out)

    def _drop_next(self, reason: str, out: list[Action]) -> None:
        following, self._next = self._next, None
        assert following is not None
        self._refuse(following.peer, following.begin.update, reason, out, retryable=True)

    def _bucket(self, bucket: m.Bucket, data: Any, now: float, out: list[Action]) -> None:
        update = self._update
        assert update is not None
        if update.phase is not Phase.SENDING or update.commit_asked:
            self._fail(["the publisher sent a bucket out of turn"], out)
        elif bucket.index != update.num_buckets:
            self._fail([f"bucket {bucket.index} came where {update.num_buckets} was due"], out)
        elif update.num_buckets - update.acked >= self.limits.window:
            self._fail([f"more than {self.limits.window} buckets were sent without waiting for an ack"], out)
        elif data is None or len(data) > update.begin.bucket_bytes:
            self._fail([f"bucket {bucket.index} has no bulk frame or one of more than {update.begin.bucket_bytes} bytes"], out)
        else:
            update.num_buckets += 1
            update.heard_at = now
            out += [SendNode(node, bucket, data) for node in update.acks]

    # ---- nodes ----------------------------------------------------------------------------------------------------------

    def _joined(self, node: str, version: int, out: list[Action]) -> None:
        if self.version is None or (version > self.version and self._update is None):
            self.version = version
            out.append(VersionChanged(version))
        self._nodes[node] = _Node(version)
        self._refresh(out)

    def _left(self, node: str, reason: str, now: float, out: list[Action]) -> None:
        if self._nodes.pop(node, None) is None:
            return
        for peer in [p for p, asked in self._asking.items() if asked == node]:
            del self._asking[peer]
            self._describe(peer, out)
        update = self._update
        if update is None or node not in update.acks:
            return
        if update.phase is not Phase.COMMITTING:
            self._fail([f"node {node} was lost: {reason}"], out, retryable=True)
        elif node in update.waiting:
            self._swap_failed(node, reason, False, out)

    def _node_said(self, node: str, message: m.FromNode, data: Any, now: float, out: list[Action]) -> None:
        if isinstance(message, m.Table):
            for peer in [p for p, asked in self._asking.items() if asked == node]:
                del self._asking[peer]
                table = m.Table(version=self.version or 0, bucket_bytes=self.limits.bucket_bytes)
                out.append(SendPublisher(peer, table, data))
            return
        update = self._update
        if isinstance(message, m.Failed) and not message.intact and (state := self._nodes.get(node)):
            state.version, state.trouble = None, f"its weight update failed: {'; '.join(message.reasons)}"
            self._refresh(out)
        if update is None or message.update != update.begin.update or node not in update.acks:
            if isinstance(message, m.Committed) and self._last is not None and message.update == self._last.update and node in self._nodes:
                self._nodes[node].version, self._nodes[node].trouble = message.version, ""  # it swapped after its deadline
                self._refresh(out)
            return
        update.heard_at = now
        match update.phase, message:
            case Phase.COMMITTING, m.Committed():
                self._nodes[node].version, self._nodes[node].trouble = message.version, ""
                report = message.nodes[0] if message.nodes else m.NodeReport(stage_s=0.0)
                update.reports.append(m.NodeReport(node=node, stage_s=report.stage_s, paused_s=report.paused_s))
                self._swap_ended(node, out)
            case Phase.COMMITTING, m.Failed():
                self._swap_failed(node, "; ".join(message.reasons), message.intact, out)
            case _, m.Failed():
                self._fail([f"node {node}: {reason}" for reason in message.reasons], out, retryable=message.retryable)
            case Phase.CHECKING, m.Ready():
                update.waiting.discard(node)
                if not update.waiting:
                    update.phase = Phase.SENDING
                    out.append(SendPublisher(update.peer, m.Ready(update=update.begin.update, window=self.limits.window)))
            case Phase.SENDING, m.Ack():
                update.acks[node] = max(update.acks[node], message.count)
                if (acked := min(update.acks.values())) > update.acked:
                    update.acked, update.told_at = acked, now
                    out.append(SendPublisher(update.peer, m.Ack(update=update.begin.update, count=acked)))
            case Phase.SENDING, m.Prepared():
                update.prepared.add(node)
                self._try_prepare(now, out)

    # ---- phases ---------------------------------------------------------------------------------------------------------

    def _try_prepare(self, now: float, out: list[Action]) -> None:
        update = self._update
        assert update is not None
        if update.phase is not Phase.SENDING or not update.commit_asked or len(update.prepared) < len(update.acks):
            return
        if update.begin.policy == "finish":
            update.phase = Phase.DRAINING
            out.append(HoldDispatch())
        else:
            self._decide(now, out)

    def _decide(self, now: float, out: list[Action]) -> None:
        update = self._update
        assert update is not None
        update.phase, update.ends_at, update.waiting = Phase.COMMITTING, now + self.limits.commit_s, set(update.acks)
        out += [SendNode(node, m.Commit(update=update.begin.update)) for node in update.acks]

    def _swap_ended(self, node: str, out: list[Action]) -> None:
        """One more node has swapped or failed to; the last one ends the update."""
        update = self._update
        assert update is not None
        begin = update.begin
        update.waiting.discard(node)
        if update.reports and self.version != begin.version:
            self.version = begin.version
            out.append(VersionChanged(begin.version))
        if not update.waiting:
            self._update, self._last = None, begin
        self._refresh(out)
        if update.waiting:
            return
        if begin.policy == "finish":
            out.append(ReleaseDispatch())
        if update.reports:
            done = m.Committed(update=begin.update, version=begin.version, nodes=tuple(update.reports), lost=tuple(sorted(update.failures)))
            out.append(SendPublisher(update.peer, done))
        else:
            reasons = m.short([f"node {name}: {reason}" for name, reason in update.failures.items()])
            self._refuse(update.peer, begin.update, reasons, out, retryable=True)

    def _swap_failed(self, node: str, reason: str, intact: bool, out: list[Action]) -> None:
        update = self._update
        assert update is not None
        update.failures[node] = reason
        if state := self._nodes.get(node):
            state.trouble = f"its weight update failed: {reason}"
            state.version = state.version if intact else None
        self._swap_ended(node, out)

    def _refresh(self, out: list[Action]) -> None:
        """A node serves when it holds the service's version; while it swaps, things stay as they are."""
        for name, node in self._nodes.items():
            serving = node.version == self.version
            swapping = self.phase is Phase.COMMITTING and self._update is not None and name in self._update.waiting
            if node.serving is serving or (swapping and node.version is not None and node.serving is not None):
                continue
            node.serving = serving
            behind = f"it holds weights version {node.version}, the service is at {self.version}; the next update helps"
            out.append(SetServing(name, serving, "" if serving else node.trouble or behind))

    def _fail(self, reasons: Sequence[str], out: list[Action], *, retryable: bool = False, code: str = DEFAULT_CODE) -> None:
        """End an update that was not decided: the old version goes on everywhere."""
        update = self._update
        assert update is not None and update.phase is not Phase.COMMITTING
        self._update = None
        told = m.short(reasons)
        out += [SendNode(node, m.Abort(update=update.begin.update, reason=told[0])) for node in update.acks if node in self._nodes]
        if update.phase is Phase.DRAINING:
            out.append(ReleaseDispatch())
        self._refuse(update.peer, update.begin.update, told, out, retryable, code)

    def _refuse(
        self, peer: Peer, update: str, reasons: str | Sequence[str], out: list[Action], retryable: bool = False, code: str = DEFAULT_CODE
    ) -> None:
        told = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        out.append(SendPublisher(peer, m.Failed(update=update, version=self.version or 0, reasons=told, retryable=retryable, code=code)))

    def _check_deadlines(self, now: float, out: list[Action]) -> None:
        update = self._update
        if update is None:
            return
        limits = self.limits
        if update.phase is Phase.COMMITTING:
            if now >= update.ends_at:
                for node in sorted(update.waiting):
                    self._swap_failed(node, f"it did not swap within {limits.commit_s:g} s", False, out)
                return
        elif now >= update.ends_at:
            took = f"the update took longer than timeout_s={update.begin.timeout_s:g} while {update.phase.value}"
            self._fail([f"{took}; raise timeout_s or choose policy abort or continue"], out, retryable=True)
            return
        elif update.phase is not Phase.DRAINING and now >= update.heard_at + limits.silence_s:
            self._fail([f"{self._awaited(update)} was silent for {limits.silence_s:g} s"], out, retryable=True)
            return
        if now >= update.told_at + limits.progress_s:
            update.told_at = now
            out.append(SendPublisher(update.peer, m.Progress(update=update.begin.update, phase=update.phase.value)))

    def _awaited(self, update: _Update) -> str:
        if update.phase is Phase.CHECKING:
            return f"node {', '.join(sorted(update.waiting))}"
        behind = sorted(node for node, count in update.acks.items() if count < update.num_buckets)
        return f"node {', '.join(behind)}" if behind else "the publisher"
