"""The coordinator under any order of events: every update ends, and then all serving nodes hold the same version."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from weights_sync import messages as m
from weights_sync.coordinator import Coordinator, CoordinatorLimits, Phase
from weights_sync.events import (
    Drained,
    HeldByPause,
    HoldDispatch,
    NodeJoined,
    NodeLeft,
    NodeSaid,
    PublisherLeft,
    PublisherSaid,
    ReleaseDispatch,
    SendNode,
    SendPublisher,
    SetServing,
    Tick,
    VersionChanged,
)

LIMITS = CoordinatorLimits(bucket_bytes=m.MIN_BUCKET_BYTES, window=2, silence_s=10, commit_s=30)
NUM_BUCKETS = 3


class Node:
    """A truthful node in five words: it stages, swaps on commit, forgets on abort."""

    def __init__(self, version):
        self.version, self.update, self.staged, self.broken = version, None, 0, False
        self.inbox = []


class AnyOrder(RuleBasedStateMachine):
    """Messages to nodes lie in inboxes until a rule delivers them; nodes and publishers die, hang and refuse when they like."""

    peers = Bundle("peers")

    @initialize(count=st.integers(1, 3))
    def start(self, count):
        self.now, self.nodes, self.serving, self.version, self.held = 0.0, {}, {}, None, False
        self.names, self.replies, self.pushes = 0, {}, {}
        self.coordinator = Coordinator(LIMITS)
        for _ in range(count):
            self.join(0)

    def tell(self, event):
        queue = [event]
        while queue:
            for action in self.coordinator.handle(queue.pop(0), self.now):
                match action:
                    case SendNode(node, message, _):
                        assert node in self.nodes
                        self.nodes[node].inbox.append(message)
                    case SendPublisher(peer, message, _):
                        self.replies.setdefault(peer, []).append(message)
                    case SetServing(node, serving, reason):
                        assert serving or reason
                        self.serving[node] = serving
                    case VersionChanged(version):
                        assert self.version is None or version > self.version
                        self.version = version
                    case HoldDispatch():
                        assert not self.held
                        self.held = True
                    case ReleaseDispatch():
                        assert self.held
                        self.held = False

    def join(self, version):
        name = f"n{self.names}"
        self.names += 1
        self.nodes[name] = Node(version)
        self.tell(NodeJoined(name, version))

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.nodes)))

    def deliver(self, name):
        node = self.nodes[name]
        match message := node.inbox.pop(0):
            case m.Begin():
                node.update, node.staged, node.incoming = message.update, 0, message.version
                return m.Ready(update=message.update, window=64)
            case m.Abort():
                node.update = None
                return None
            case m.Describe():
                return m.Table(version=node.version, bucket_bytes=m.MIN_BUCKET_BYTES)
        if node.update != message.update:
            return m.Failed(update=message.update, version=node.version, reasons=("not open",)) if isinstance(message, m.Commit) else None
        if isinstance(message, m.Bucket):
            node.staged += 1
            return m.Ack(update=node.update, count=node.staged)
        assert node.staged == NUM_BUCKETS, "commit before everything was staged"
        node.version, node.update = node.incoming, None
        return m.Committed(update=message.update, version=node.version, nodes=(m.NodeReport(stage_s=0),))

    # ---- rules ----------------------------------------------------------------------------------------------------------

    @rule(target=peers, step=st.integers(0, 2), policy=st.sampled_from(["finish", "abort", "continue"]))
    def begin(self, step, policy):
        peer = f"p{len(self.pushes)}".encode()
        begin = m.Begin(
            update=m.new_update_id(),
            version=max(0, (self.version or 0) + step - 1),
            policy=policy,
            timeout_s=60.0,
            bucket_bytes=m.MIN_BUCKET_BYTES,
        )
        self.pushes[peer] = [begin, 0]
        self.tell(PublisherSaid(peer, begin, b"table"))
        return peer

    @rule(peer=peers)
    def push_on(self, peer):
        """A correct publisher sends what is due."""
        begin, sent = self.pushes[peer]
        replies = self.replies.get(peer, [])
        acked = max((r.count for r in replies if isinstance(r, m.Ack)), default=0)
        if not any(isinstance(r, m.Ready) for r in replies) or any(isinstance(r, m.Failed | m.Committed) for r in replies):
            return
        if sent < NUM_BUCKETS and sent - acked < LIMITS.window:
            self.pushes[peer][1] += 1
            self.tell(PublisherSaid(peer, m.Bucket(update=begin.update, index=sent, digest=0), b"x" * 64))
        elif sent == NUM_BUCKETS:
            self.pushes[peer][1] += 1
            self.tell(PublisherSaid(peer, m.Commit(update=begin.update)))

    @rule(peer=peers, what=st.sampled_from(["leave", "abort", "rogue bucket", "early commit", "big bucket"]))
    def misbehave(self, peer, what):
        update = self.pushes[peer][0].update
        event = {
            "leave": PublisherLeft(peer),
            "abort": PublisherSaid(peer, m.Abort(update=update, reason="tired")),
            "rogue bucket": PublisherSaid(peer, m.Bucket(update=update, index=99, digest=0), b""),
            "early commit": PublisherSaid(peer, m.Commit(update=update)),
            "big bucket": PublisherSaid(peer, m.Bucket(update=update, index=0, digest=0), bytes(m.MIN_BUCKET_BYTES + 1)),
        }[what]
        self.tell(event)

    @precondition(lambda self: any(node.inbox for node in self.nodes.values()))
    @rule(data=st.data())
    def work(self, data):
        name = data.draw(st.sampled_from(sorted(n for n, node in self.nodes.items() if node.inbox)))
        answer = self.deliver(name)
        if answer is not None:
            self.tell(NodeSaid(name, answer))
        node = self.nodes[name]
        if isinstance(answer, m.Ack) and node.staged == NUM_BUCKETS:
            self.tell(NodeSaid(name, m.Prepared(update=answer.update)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), intact=st.booleans())
    def refuse(self, data, intact):
        name = self.pick(data)
        node = self.nodes[name]
        if node.update is None:
            return
        update, node.update = node.update, None
        if not intact:
            node.version = -1  # a mixture
        self.tell(NodeSaid(name, m.Failed(update=update, version=0, reasons=("no",), intact=intact)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def die(self, data):
        name = self.pick(data)
        del self.nodes[name]
        self.serving.pop(name, None)
        self.tell(NodeLeft(name, "died"))

    @rule(behind=st.integers(0, 1))
    def join_late(self, behind):
        if len(self.nodes) < 4:
            self.join(max(0, (self.version or 0) - behind))

    @precondition(lambda self: self.held)
    @rule()
    def drain(self):
        self.tell(Drained())

    @precondition(lambda self: self.held)
    @rule()
    def pause(self):
        self.tell(HeldByPause(3))

    @rule(seconds=st.sampled_from([0.5, 3, 11, 31, 61]))
    def wait(self, seconds):
        self.now += seconds
        self.tell(Tick())

    # ---- promises -------------------------------------------------------------------------------------------------------

    @invariant()
    def serving_nodes_agree_when_no_update_runs(self):
        if not getattr(self, "nodes", None) or self.coordinator.busy:
            return
        for name, node in self.nodes.items():
            assert self.serving[name] == self.coordinator.is_serving(name)
            if self.serving[name]:
                assert node.version == self.version == self.coordinator.version
        assert not self.held

    @invariant()
    def dispatch_is_held_only_while_draining_or_swapping(self):
        if getattr(self, "held", False):
            assert self.coordinator.phase in (Phase.DRAINING, Phase.COMMITTING)

    def teardown(self):
        """Whatever happened, deadlines end the update, everybody who pushed has one last word, and the next update works."""
        if not hasattr(self, "coordinator"):
            return
        for _ in range(4):
            self.wait(61)
        assert not self.coordinator.busy
        for peer in self.pushes:
            finals = [r for r in self.replies.get(peer, []) if isinstance(r, m.Failed | m.Committed)]
            assert finals, "a publisher was left without an answer"
        self.serving_nodes_agree_when_no_update_runs()
        while any(node.inbox for node in self.nodes.values()):
            for name in self.nodes:
                if self.nodes[name].inbox:
                    answer = self.deliver(name)
                    if answer is not None:
                        self.tell(NodeSaid(name, answer))
        self.serving_nodes_agree_when_no_update_runs()
        if not self.nodes:
            self.join(self.version or 0)
        peer = self.begin(2, "finish")
        for _ in range(100):
            for name, node in self.nodes.items():
                while node.inbox:
                    answer = self.deliver(name)
                    if answer is not None:
                        self.tell(NodeSaid(name, answer))
                    if isinstance(answer, m.Ack) and node.staged == NUM_BUCKETS:
                        self.tell(NodeSaid(name, m.Prepared(update=answer.update)))
            self.push_on(peer)
            if self.held:
                self.drain()
        assert isinstance(self.replies[peer][-1], m.Committed)
        assert all(self.serving.values()) and {node.version for node in self.nodes.values()} == {self.version}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, report_multiple_bugs=False)


@pytest.fixture
def decided():
    """Two nodes that were told to commit version 1."""
    coordinator = Coordinator(LIMITS)
    for name in "ab":
        coordinator.handle(NodeJoined(name, 0), 0.0)
    begin = m.Begin(update=m.new_update_id(), version=1, policy="abort", timeout_s=60.0, bucket_bytes=m.MIN_BUCKET_BYTES)
    coordinator.handle(PublisherSaid(b"p", begin, b"t"), 0.0)
    for name in "ab":
        coordinator.handle(NodeSaid(name, m.Ready(update=begin.update, window=1)), 0.0)
    coordinator.handle(PublisherSaid(b"p", m.Commit(update=begin.update)), 0.0)
    for name in "ab":
        actions = coordinator.handle(NodeSaid(name, m.Prepared(update=begin.update)), 0.0)
    assert [a.message for a in actions] == [m.Commit(update=begin.update)] * 2
    return coordinator, begin


def test_publisher_that_dies_after_commit_does_not_stop_the_swap(decided):
    coordinator, begin = decided
    assert coordinator.handle(PublisherLeft(b"p"), 0.0) == []
    for name in "ab":
        coordinator.handle(NodeSaid(name, m.Committed(update=begin.update, version=1, nodes=())), 0.0)
    assert coordinator.version == 1


def test_node_that_comes_back_with_the_new_version_serves_again(decided):
    coordinator, begin = decided
    coordinator.handle(NodeLeft("b", "connection lost"), 0.0)
    coordinator.handle(NodeSaid("a", m.Committed(update=begin.update, version=1, nodes=(m.NodeReport(stage_s=0),))), 0.0)
    assert coordinator.handle(NodeJoined("b", 1), 1.0) == [SetServing("b", True)]


def test_node_with_a_mixture_of_weights_is_set_aside_with_the_reason(decided):
    coordinator, begin = decided
    failed = m.Failed(update=begin.update, version=0, reasons=("copy failed",), intact=False)
    (aside,) = coordinator.handle(NodeSaid("a", failed), 0.0)
    assert aside == SetServing("a", False, "its weight update failed: copy failed")


def test_node_that_reports_a_mixture_is_set_aside_even_while_another_update_is_being_checked():
    coordinator = Coordinator(LIMITS)
    coordinator.handle(NodeJoined("a", 0), 0.0)
    begin = m.Begin(update=m.new_update_id(), version=1, policy="abort", timeout_s=60.0, bucket_bytes=m.MIN_BUCKET_BYTES)
    coordinator.handle(PublisherSaid(b"p", begin, b"t"), 0.0)
    failed = m.Failed(update=m.new_update_id(), version=0, reasons=("an earlier copy failed",), intact=False)
    assert coordinator.handle(NodeSaid("a", failed), 0.0) == [SetServing("a", False, "its weight update failed: an earlier copy failed")]
