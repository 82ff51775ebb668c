"""Random walks through the router: whatever happens, every accepted sample ends exactly once and nothing is left behind."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_router import delivered, orders, request, results

from rollout.limits import ServiceLimits
from rollout.router import Router
from rollout.router_types import (
    AbortedAll,
    AbortParts,
    Accepted,
    Cancelled,
    ClientJoined,
    ClientLost,
    Deliver,
    Hold,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeResults,
    NodeServing,
    Order,
    Retired,
    Submitted,
    Tick,
)
from rollout.samples import indices

CLIENTS = ("c", "d")
NODES = ("a", "b", "e")


class RouterWalk(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.router = Router(ServiceLimits(default_timeout_s=50, no_node_grace_s=20, credits=12))
        self.now = 0.0
        self.clients: set[str] = set()
        self.nodes: set[str] = set()
        self.work: dict[str, dict[int, tuple[Order, set[int]]]] = {}
        """What each node really runs: part → (order, samples not sent yet)."""
        self.expected: dict[tuple[str, int], int] = {}
        self.results: Counter[tuple[str, int, int]] = Counter()
        self.runs: Counter[tuple[str, int, int]] = Counter()
        self.sizes: dict[tuple[str, int], int] = {}
        self.sizes: dict[tuple[str, int], int] = {}
        self.next_id = dict.fromkeys(CLIENTS, 0)

    def do(self, event):
        actions = self.router.handle(event, self.now)
        for action in actions:
            if isinstance(action, Accepted):
                for number in action.requests:
                    self.expected.setdefault((action.client, number), self.sizes[(action.client, number)])
            elif isinstance(action, Deliver):
                assert action.client in self.clients
                for number, index, _, _ in delivered([action]):
                    self.results[(action.client, number, index)] += 1
            elif isinstance(action, AbortParts):
                for part in action.parts:
                    assert part in self.work[action.node]
            else:
                for order in orders([action]):
                    self.work[action.node][order.part] = (order, set(indices(order.samples)))
        return actions

    @rule(client=st.sampled_from(CLIENTS))
    def client_joins(self, client):
        if client not in self.clients:
            self.clients.add(client)
            self.do(ClientJoined(client))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), sizes=st.lists(st.sampled_from([1, 1, 2, 9, 40]), min_size=1, max_size=4), timeout_s=st.sampled_from([0.0, 3.0]))
    def submit(self, data, sizes, timeout_s):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        requests = []
        for n in sizes:
            number = self.next_id[client]
            self.next_id[client] += 1
            self.sizes[(client, number)] = n
            requests.append(request(number, n, timeout_s))
        self.do(Submitted(client, requests))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), back=st.integers(1, 5))
    def submit_again(self, data, back):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        number = self.next_id[client] - back
        if (client, number) in self.expected:
            self.do(Submitted(client, [request(number, self.sizes[(client, number)])]))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), back=st.integers(1, 5))
    def cancel(self, data, back):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        self.do(Cancelled(client, [self.next_id[client] - back]))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def client_dies(self, data):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        self.clients.remove(client)
        self.do(ClientLost(client))
        for key in [key for key in self.expected if key[0] == client]:
            del self.expected[key]

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def acknowledge(self, data):
        client = data.draw(st.sampled_from(sorted(self.clients)))
        open_ids = [number for (one, number), n in self.expected.items() if one == client and self.finished(client, number) < n]
        self.do(Retired(client, min(open_ids, default=self.next_id[client])))

    @rule(node=st.sampled_from(NODES), window=st.sampled_from([1, 4, 16, 64]), serving=st.booleans())
    def node_joins(self, node, window, serving):
        if node not in self.nodes:
            self.nodes.add(node)
            self.work[node] = {}
            self.do(NodeJoined(node, window, serving))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def node_dies(self, data):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.nodes.remove(node)
        self.do(NodeLost(node, "killed"))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), serving=st.booleans())
    def node_changes(self, data, serving):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.do(NodeServing(node, serving))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def node_drains(self, data):
        self.do(NodeDraining(data.draw(st.sampled_from(sorted(self.nodes)))))

    @precondition(lambda self: any(self.work.values()))
    @rule(data=st.data(), repeat=st.booleans())
    def node_finishes_some(self, data, repeat):
        """Also from nodes that were declared dead: their late results must not count."""
        node = data.draw(st.sampled_from(sorted(name for name, parts in self.work.items() if parts)))
        part = data.draw(st.sampled_from(sorted(self.work[node])))
        order, left = self.work[node][part]
        done = data.draw(st.sets(st.sampled_from(sorted(left)), min_size=1)) if left else set()
        mask = sum(1 << index for index in done)
        for _ in range(1 + repeat):
            self.do(NodeResults(node, results(order, only=mask)))
        left -= done

    @rule(seconds=st.sampled_from([0.1, 1.0, 30.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.do(Tick())

    @rule(on=st.booleans())
    def hold(self, on):
        self.do(Hold(on))

    @rule()
    def abort_all(self):
        self.do(AbortedAll())

    def finished(self, client, number):
        return sum(self.results[(client, number, index)] for index in range(self.sizes[(client, number)]))

    @invariant()
    def no_sample_ends_twice(self):
        assert all(self.results[(client, number, i)] <= 1 for (client, number), n in self.expected.items() for i in range(n))

    @invariant()
    def counts_agree(self):
        open_now = sum(self.finished(client, number) < n for (client, number), n in self.expected.items())
        assert self.router.open_requests == open_now
        assert self.router.open_bytes == 5 * open_now
        assert all(self.router.outstanding(node) >= 0 for node in self.nodes)

    def teardown(self):
        """Let everything end: every accepted sample has exactly one result and no memory is held."""
        self.do(Hold(False))
        self.now += 1000
        self.do(Tick())
        for (client, number), n in self.expected.items():
            assert [self.results[(client, number, index)] for index in range(n)] == [1] * n
        assert (self.router.open_requests, self.router.open_bytes, self.router.queued_works) == (0, 0, 0)
        assert all(self.router.outstanding(node) == 0 for node in self.nodes)


RouterWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_every_accepted_sample_ends_exactly_once = RouterWalk.TestCase
