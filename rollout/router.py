"""Who works on what. In: events (peers, requests, results, time). Out: actions (accept, assign, deliver, abort). No I/O, no clock.

Every accepted request ends in exactly one result per sample, whatever joins, dies, repeats or is cancelled in between.
Clients take turns; one client's requests go out in order. A group goes to one node as a whole, so that its samples share the prompt's
prefill, unless there are fewer groups left than nodes. A lost node's unfinished samples are queued again once, at the front.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from batchgen.errors import ErrorInfo
from batchgen.events import SampleFinished
from batchgen.outputs import Sample
from batchgen.request import sample_seed
from rollout.limits import ServiceLimits
from rollout.results import abort_sample, error_sample, pack_sample
from rollout.router_types import (
    AbortedAll,
    AbortParts,
    Accepted,
    Action,
    AssignParts,
    Cancelled,
    ClientJoined,
    ClientLost,
    Deliver,
    Event,
    Hold,
    NewRequest,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeResults,
    NodeServing,
    Order,
    Refused,
    Repeated,
    Retired,
    Submitted,
    Tick,
)
from rollout.samples import indices, lowest
from rollout.wire import ResultItem, SampleItem

MIN_SPLIT = 8
"""A group is never split into smaller pieces than this to spread it."""
DEADLINE_STEP_S = 0.25
MAX_DONE_IDS = 1 << 20
"""Finished ids remembered per client until it acknowledges a floor."""


class _Work:
    """One open request, kept small: a million of these may wait."""

    __slots__ = (
        "cancelled", "client", "due", "id", "kind", "missing", "params", "parts", "prompt", "queued", "retried", "seed_base", "stream",
    )  # fmt: skip

    def __init__(self, client: "_Client", request: NewRequest, due: int):
        self.client = client
        self.id = request.id
        self.kind = request.kind
        self.prompt = request.prompt
        self.params = request.params
        self.seed_base = request.seed_base
        self.stream = request.stream
        self.due = due
        self.missing = self.queued = (1 << request.params.n) - 1
        self.retried = 0
        self.cancelled = False
        self.parts: list[_Part] | None = None


class _Part:
    __slots__ = ("id", "missing", "node", "work")

    def __init__(self, part_id: int, node: "_Node", work: _Work, missing: int):
        self.id, self.node, self.work, self.missing = part_id, node, work, missing


class _Client:
    __slots__ = ("done", "floor", "key", "queue", "waiting", "works")

    def __init__(self, key: str):
        self.key = key
        self.works: dict[int, _Work] = {}
        self.queue: deque[_Work] = deque()
        self.done: set[int] = set()
        self.floor = 0
        self.waiting = False
        """Whether it stands in the line of clients with queued work."""


class _Node:
    __slots__ = ("draining", "key", "outstanding", "parts", "serving", "window")

    def __init__(self, key: str, window: int, serving: bool):
        self.key, self.window, self.serving = key, window, serving
        self.draining = False
        self.outstanding = 0
        self.parts: dict[int, _Part] = {}

    @property
    def free(self) -> int:
        return self.window - self.outstanding if self.serving and not self.draining else 0


class Router:
    """The state machine. `handle(event, now)` is the only door."""

    def __init__(self, limits: ServiceLimits):
        self.limits = limits
        self.counters: Counter[str] = Counter()
        self.open_requests = 0
        self.open_bytes = 0
        self.queued_works = 0
        self.draining = False
        self._held = False
        self._clients: dict[str, _Client] = {}
        self._nodes: dict[str, _Node] = {}
        self._line: deque[_Client] = deque()
        self._due: dict[int, set[_Work]] = {}
        self._due_heap: list[int] = []
        self._next_part = 0
        self._served = False
        self._no_nodes_since: float | None = None
        """When the last serving node was lost or set aside."""
        self._actions: list[Action] = []
        self._deliveries: dict[str, list[tuple[ResultItem, Any]]] = {}

    def handle(self, event: Event, now: float) -> list[Action]:
        """Apply one event; returns what has to be done, in order."""
        match event:
            case NodeResults():
                self._results(event)
            case Submitted():
                self._submit(event, now)
            case Tick():
                self._tick(now)
            case Cancelled():
                self._cancel(self._clients.get(event.client), event.requests, "cancelled by the client")
            case Retired():
                self._retire(event)
            case ClientJoined():
                self._clients.setdefault(event.client, _Client(event.client))
            case ClientLost():
                self._client_lost(event.client)
            case NodeJoined():
                self._nodes[event.node] = _Node(event.node, event.window, event.serving)
            case NodeServing():
                if event.node in self._nodes:
                    self._nodes[event.node].serving = event.serving
            case NodeDraining():
                if event.node in self._nodes:
                    self._nodes[event.node].draining = True
            case NodeLost():
                self._node_lost(event)
            case AbortedAll():
                for client in self._clients.values():
                    self._cancel(client, list(client.works), "abort_all")
            case Hold():
                self._held = event.on
        if any(node.serving for node in self._nodes.values()):
            self._served, self._no_nodes_since = True, None
        elif self._served:
            self._served, self._no_nodes_since = False, now
        if self._line and not self._held:
            self._dispatch()
        actions = self._actions + [Deliver(key, items) for key, items in self._deliveries.items()]
        self._actions, self._deliveries = [], {}
        return actions

    def outstanding(self, node: str) -> int:
        """Samples a node has and has not finished."""
        return self._nodes[node].outstanding if node in self._nodes else 0

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _submit(self, event: Submitted, now: float) -> None:
        client = self._clients.get(event.client)
        if client is None:
            return
        accepted: list[int] = []
        for request in event.requests:
            if request.id in client.works:
                self.counters["duplicate_requests"] += 1
                accepted.append(request.id)
            elif request.id in client.done:
                self.counters["duplicate_requests"] += 1
                self._actions.append(Repeated(client.key, request.id))
            elif (refusal := self._refusal(client, request)) is not None:
                self.counters[f"rejected_{refusal.code}"] += 1
                self._actions.append(Refused(client.key, [request.id], refusal, self.limits.retry_after_s if refusal.retryable else 0.0))
            else:
                accepted.append(request.id)
                self._open(client, request, now)
        if accepted:
            self._actions.insert(0, Accepted(client.key, accepted))

    def _refusal(self, client: _Client, request: NewRequest) -> ErrorInfo | None:
        limits = self.limits
        if request.id < client.floor:
            return ErrorInfo(code="already_finished", message=f"request {request.id} is below the acknowledged floor {client.floor}")
        if self.draining:
            return ErrorInfo(code="draining", message="the service is shutting down and takes no more requests", retryable=True)
        if len(client.works) >= limits.credits:
            return _full("credits", f"this client has {len(client.works)} unfinished requests, its credit is {limits.credits}")
        if len(client.done) >= MAX_DONE_IDS:
            return _full("unacknowledged", f"{len(client.done)} finished ids are above the acknowledged floor; send ack with a floor")
        if self.open_requests >= limits.max_queued_requests:
            return _full("queue_full", f"the service holds {self.open_requests} requests, its limit is {limits.max_queued_requests}")
        if self.open_bytes + _size(request) > limits.max_queued_bytes:
            return _full("queue_full", f"the service holds {self.open_bytes} bytes of prompts, its limit is {limits.max_queued_bytes}")
        return None

    def _open(self, client: _Client, request: NewRequest, now: float) -> None:
        due = int((now + (request.timeout_s or self.limits.default_timeout_s)) / DEADLINE_STEP_S) + 1
        work = _Work(client, request, due)
        client.works[work.id] = work
        if due not in self._due:
            self._due[due] = set()
            heapq.heappush(self._due_heap, due)
        self._due[due].add(work)
        self.open_requests += 1
        self.open_bytes += _size(work)
        self.counters["accepted_requests"] += 1
        self.counters["accepted_samples"] += work.params.n
        self.queued_works += 1
        client.queue.append(work)
        self._stand_in_line(client)

    def _close(self, work: _Work) -> None:
        """Every sample has its result, or nobody wants it any more."""
        client = work.client
        del client.works[work.id]
        if work.id >= client.floor:
            client.done.add(work.id)
        self._due[work.due].discard(work)
        work_bytes = _size(work)
        work.prompt = b""
        self.open_requests -= 1
        self.open_bytes -= work_bytes

    def _retire(self, event: Retired) -> None:
        client = self._clients.get(event.client)
        if client is not None and event.floor > client.floor:
            passed = range(client.floor, event.floor)
            client.done.difference_update(passed if len(passed) < len(client.done) else [done for done in client.done if done in passed])
            client.floor = event.floor

    def _cancel(self, client: _Client | None, requests: Iterable[int], detail: str) -> None:
        """Queued samples end here; those at nodes come back from there, with the tokens they have."""
        if client is None:
            return
        aborts: dict[str, list[int]] = {}
        for request_id in requests:
            work = client.works.get(request_id)
            if work is None:
                continue
            self.counters["cancelled_requests"] += 1
            work.cancelled = True
            queued = self._unqueue(work)
            for part in work.parts or ():
                aborts.setdefault(part.node.key, []).append(part.id)
            for index in indices(queued):
                self._finish_here(work, abort_sample(index, sample_seed(work.seed_base, index), detail))
        self._abort(aborts)

    def _fail(self, work: _Work, error: ErrorInfo) -> None:
        """Give every missing sample an error result now; what nodes still send is ignored."""
        self._unqueue(work)
        self._abort(self._drop_parts(work))
        for index in indices(work.missing):
            self._finish_here(work, error_sample(index, sample_seed(work.seed_base, index), error))

    def _finish_here(self, work: _Work, sample: Sample) -> None:
        item, body = pack_sample(work.id, SampleFinished(request_id="", sample=sample), work.params.logprobs_mode)
        self._finish(work, item, body)

    def _finish(self, work: _Work, item: SampleItem, body: Any) -> None:
        work.missing &= ~(1 << item.index)
        item.request = work.id
        self.counters["finished_" + item.finish_reason] += 1
        self._deliveries.setdefault(work.client.key, []).append((item, body))
        if not work.missing:
            self._close(work)

    def _client_lost(self, key: str) -> None:
        client = self._clients.pop(key, None)
        if client is None:
            return
        aborts: dict[str, list[int]] = {}
        for work in list(client.works.values()):
            self.counters["orphaned_samples"] += work.missing.bit_count()
            self._unqueue(work)
            for node, parts in self._drop_parts(work).items():
                aborts.setdefault(node, []).extend(parts)
            self._close(work)
        client.queue.clear()
        self._abort(aborts)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def _results(self, event: NodeResults) -> None:
        node = self._nodes.get(event.node)
        for item, body in event.items:
            part = node.parts.get(item.request) if node is not None else None
            if part is None or node is None:
                self.counters["late_results"] += 1
                continue
            work = part.work
            if isinstance(item, SampleItem):
                bit = 1 << item.index
                if not part.missing & bit:
                    self.counters["repeated_results"] += 1
                    continue
                part.missing &= ~bit
                node.outstanding -= 1
                if not part.missing:
                    self._forget_part(part)
                self._finish(work, item, body)
            else:
                item.request = work.id
                self._deliveries.setdefault(work.client.key, []).append((item, body))

    def _node_lost(self, event: NodeLost) -> None:
        node = self._nodes.pop(event.node, None)
        if node is None:
            return
        self.counters["lost_nodes"] += 1
        for part in list(node.parts.values()):
            work = part.work
            self._forget_part(part)
            if work.cancelled:
                for index in indices(part.missing):
                    self._finish_here(work, abort_sample(index, sample_seed(work.seed_base, index), "cancelled; its node was lost"))
                continue
            again = part.missing & ~work.retried
            lost = part.missing & work.retried
            if again:
                self.counters["requeued_samples"] += again.bit_count()
                work.retried |= again
                if not work.queued:
                    self.queued_works += 1
                    work.client.queue.appendleft(work)
                    self._stand_in_line(work.client)
                work.queued |= again
            message = f"node {event.node} was lost ({event.reason}), the second one for this sample; submit the request again"
            error = ErrorInfo(code="node_lost", message=message, retryable=True)
            for index in indices(lost):
                self._finish_here(work, error_sample(index, sample_seed(work.seed_base, index), error))

    def _drop_parts(self, work: _Work) -> dict[str, list[int]]:
        """Take a request off its nodes; returns the parts to abort."""
        aborts: dict[str, list[int]] = {}
        for part in list(work.parts or ()):
            aborts.setdefault(part.node.key, []).append(part.id)
            part.node.outstanding -= part.missing.bit_count()
            self._forget_part(part)
        return aborts

    def _forget_part(self, part: _Part) -> None:
        part.node.parts.pop(part.id, None)
        if part.work.parts is not None:
            part.work.parts.remove(part)

    def _abort(self, aborts: dict[str, list[int]]) -> None:
        self._actions += [AbortParts(node, parts) for node, parts in aborts.items()]

    # ---- time and turns ---------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        while self._due_heap and self._due_heap[0] * DEADLINE_STEP_S <= now:
            due = heapq.heappop(self._due_heap)
            for work in list(self._due[due]):
                self.counters["deadlines"] += 1
                message = "the request's deadline passed before all its samples were done; raise timeout_s or send less at once"
                self._fail(work, ErrorInfo(code="deadline", message=message, retryable=True))
            del self._due[due]
        grace = self.limits.no_node_grace_s
        if self._no_nodes_since is not None and now - self._no_nodes_since > grace:
            message = f"no node serves the model and none joined within {grace:g} s of losing the last; start one with `rollout node`"
            error = ErrorInfo(code="no_nodes", message=message, retryable=True)
            for client in list(self._clients.values()):
                for work in list(client.works.values()):
                    self._fail(work, error)

    def _unqueue(self, work: _Work) -> int:
        """Take a request's samples out of the queue; its entry in the client's queue is skipped later."""
        queued, work.queued = work.queued, 0
        if queued:
            self.queued_works -= 1
        return queued

    def _stand_in_line(self, client: _Client) -> None:
        if not client.waiting:
            client.waiting = True
            self._line.append(client)

    def _dispatch(self) -> None:
        orders: dict[str, list[Order]] = {}
        while self._line:
            client = self._line[0]
            while client.queue and not client.queue[0].queued:
                client.queue.popleft()
            if not client.queue:
                client.waiting = False
                self._line.popleft()
                continue
            node = max(self._nodes.values(), key=lambda n: n.free / n.window, default=None)
            work = client.queue[0]
            wanted = work.queued.bit_count()
            if node is None or node.free < min(wanted, MIN_SPLIT, node.window):
                break
            take = min(self._share(node, wanted), node.free)
            orders.setdefault(node.key, []).append(self._assign(work, node, take))
            self._line.rotate(-1)
        self._actions += [AssignParts(node, parts) for node, parts in orders.items()]

    def _share(self, node: _Node, wanted: int) -> int:
        """How many of a group's samples this node should get: all, unless other nodes would be left without work."""
        able = [other for other in self._nodes.values() if other.free > 0]
        if self.queued_works >= len(able):
            return wanted
        level = -(-(sum(other.outstanding for other in able) + wanted) // len(able))
        share = max(MIN_SPLIT, level - node.outstanding)
        return share if wanted - share >= MIN_SPLIT else wanted

    def _assign(self, work: _Work, node: _Node, take: int) -> Order:
        mask = lowest(work.queued, take)
        work.queued &= ~mask
        if not work.queued:
            self.queued_works -= 1
        part = _Part(self._next_part, node, work, mask)
        self._next_part += 1
        node.parts[part.id] = part
        node.outstanding += take
        if work.parts is None:
            work.parts = []
        work.parts.append(part)
        return Order(part.id, work.kind, work.prompt, work.params, work.seed_base, mask, work.stream)


def _size(request: NewRequest | _Work) -> int:
    """Bytes a request holds; parameters shared with others are counted each time, because nobody promises that they are shared."""
    return len(request.prompt) + len(request.params.encoded)


def _full(code: str, message: str) -> ErrorInfo:
    return ErrorInfo(code=code, message=f"{message}; send again later", retryable=True)
