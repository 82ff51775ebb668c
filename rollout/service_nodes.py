"""The service's desk for nodes. In: decoded messages of node connections. Out: router and coordinator events, and orders through the hub.

Holds what is known of each node; knows nothing of clients.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from batchgen.events import EngineStats, ModelFacts
from rollout import wire
from rollout.batches import Batch, prompt_length
from rollout.errors import ProtocolError
from rollout.results import NodeHealth, check_body
from rollout.router_types import AbortParts, AssignParts, NodeDraining, NodeJoined, NodeLost, NodeResults, Order
from rollout.samples import ranges
from rollout.service_clients import Hub
from weights_sync import events as sync
from weights_sync import messages as weights

log = logging.getLogger("rollout.service")
_decoder = weights.Decoder(weights.FromNode)


class NodePeer:
    """One joined node."""

    def __init__(self, name: str, peer: bytes, user: str, hello: wire.NodeHello, now: float):
        self.name, self.peer, self.user = name, peer, user
        self.session, self.window = hello.session, hello.window
        self.weights_version = hello.weights_version
        self.serving = False
        self.last_seen = now
        self.step_age_s: float | None = None
        self.stats: EngineStats | None = None


class NodeDesk:
    """Nodes by name and by connection."""

    def __init__(self, hub: Hub, sync_event: Callable[[sync.Event], None], outstanding: Callable[[str], int]):
        self._hub = hub
        self._sync_event = sync_event
        self._outstanding = outstanding
        self.nodes: dict[str, NodePeer] = {}
        self._by_peer: dict[bytes, NodePeer] = {}
        self.model: ModelFacts | None = None
        self.lost: deque[str] = deque(maxlen=8)
        self.paused = False

    def node_of(self, peer: bytes) -> NodePeer | None:
        return self._by_peer.get(peer)

    # ---- coming and going ---------------------------------------------------------------------------------------------

    def hello(self, peer: bytes, hello: wire.NodeHello, user: str) -> bool:
        """Returns whether the node was taken."""
        hub = self._hub
        known = self._by_peer.get(peer)
        if known is not None and known.session == hello.session:
            self.welcome(known, hub.welcome_node(known.serving))
            return False
        if known is not None:
            self.lose(known, "rejoined", "it dropped its work and said hello again", tell=False)
        if len(self.nodes) >= hub.limits.max_nodes:
            hub.count("refused_nodes")
            hub.bye(peer, "too_many_nodes", f"the service has {len(self.nodes)} nodes, its limit is {hub.limits.max_nodes}")
            return False
        if self.model is not None and self.model.fingerprint != hello.model.fingerprint:
            hub.count("refused_nodes")
            theirs, ours = hello.model, self.model
            reason = (
                f"the node holds {theirs.name} (fingerprint {theirs.fingerprint[:16]}), this service serves {ours.name} "
                f"({ours.fingerprint[:16]}); start the node with the same model folder"
            )
            hub.bye(peer, "model_mismatch", reason)
            return False
        if self.model is None:
            self.model = hello.model
        base = name = hello.name or "node"
        number = 1
        while name in self.nodes:
            number += 1
            name = f"{base}-{number}"
        node = self.nodes[name] = self._by_peer[peer] = NodePeer(name, peer, user, hello, hub.now())
        log.info("node %s joined with weights version %d, window %d", name, hello.weights_version, hello.window)
        hub.route(NodeJoined(name, node.window, False))
        self._sync_event(sync.NodeJoined(name, hello.weights_version))
        if self.paused:
            self.control("pause")
        return True

    def lose(self, node: NodePeer, code: str, reason: str, *, expected: bool = False, tell: bool = True) -> None:
        """A node is gone or must go: its unfinished samples are queued again."""
        if self.nodes.pop(node.name, None) is None:
            return
        self._by_peer.pop(node.peer, None)
        self._hub.count(f"nodes_lost_{code}")
        self.lost.append(f"{node.name}: {reason}")
        (log.info if expected else log.warning)("node %s is gone: %s (%s)", node.name, code, reason)
        if tell:
            self._hub.bye(node.peer, code, reason, True)
        self._sync_event(sync.NodeLeft(node.name, reason))
        self._hub.route(NodeLost(node.name, reason))

    def peer_gone(self, peer: bytes) -> None:
        node = self._by_peer.get(peer)
        if node is not None:
            self.lose(node, "disconnected", "its connection was closed", tell=False)

    def peer_stuck(self, peer: bytes) -> None:
        node = self._by_peer.get(peer)
        if node is not None:
            self.lose(node, "slow_reader", "it does not read what it is sent")

    def beat(self) -> None:
        """Ping every node; lose the silent and those whose engine hangs."""
        now, limits = self._hub.now(), self._hub.limits
        for node in list(self.nodes.values()):
            self._tell(node, wire.Ping(sent=now))
            if now - node.last_seen > limits.node_timeout_s:
                self.lose(node, "silent", f"nothing was heard for {now - node.last_seen:.1f} s")
            elif node.step_age_s is not None and node.step_age_s > limits.engine_stall_s and not self.paused:
                self.lose(node, "stalled", f"its engine finished no step for {node.step_age_s:.1f} s")

    # ---- messages -----------------------------------------------------------------------------------------------------

    def handle(self, node: NodePeer, message: Any, frames: list[Any]) -> None:
        """A message of a joined node. ProtocolError when it is not one a node may send."""
        node.last_seen = self._hub.now()
        match message:
            case wire.Results():
                if len(frames) != len(message.items):
                    raise ProtocolError(f"results have {len(message.items)} items and {len(frames)} bodies")
                for item, body in zip(message.items, frames, strict=True):
                    check_body(item, body)
                self._hub.route(NodeResults(node.name, [(i, f.bytes) for i, f in zip(message.items, frames, strict=True)]))
            case wire.Pong():
                node.step_age_s = message.step_age_s
                if message.stats is not None:
                    node.stats = message.stats
                    node.weights_version = message.stats.weights_version
            case wire.Weights():
                if not 1 <= len(frames) <= 2:
                    raise ProtocolError(f"a weights message has one or two frames, got {len(frames)}")
                word = _decoder.decode(frames[0].buffer)
                self._sync_event(sync.NodeSaid(node.name, word, frames[1] if len(frames) == 2 else None))
            case wire.Drain():
                log.info("node %s takes no more work", node.name)
                self._hub.route(NodeDraining(node.name))
            case wire.Bye():
                self.lose(node, "left", message.error.message, expected=True, tell=False)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a node's message")

    # ---- orders -------------------------------------------------------------------------------------------------------

    def assign(self, action: AssignParts) -> None:
        node = self.nodes.get(action.node)
        if node is None:
            return
        batch, heads = Batch(), list[wire.AssignHead]()
        for order in action.orders:
            pieces = ranges(order.samples)
            head_bytes = 48 + 6 * len(pieces)
            index = batch.add(order.kind, order.prompt, order.params.encoded, head_bytes)
            if index is None:
                self._tell(node, wire.Assign(parts=heads), batch.frames())
                batch, heads = Batch(), []
                index = batch.add(order.kind, order.prompt, order.params.encoded, head_bytes)
            heads.append(_head(order, index or 0, pieces))
        self._tell(node, wire.Assign(parts=heads), batch.frames())

    def abort(self, action: AbortParts) -> None:
        node = self.nodes.get(action.node)
        if node is not None:
            for start in range(0, len(action.parts), 4096):
                self._tell(node, wire.Abort(parts=action.parts[start : start + 4096]))

    def control(self, op: str) -> int:
        """Tell every node; returns how many."""
        message = msgspec.convert({"type": "control", "op": op}, wire.Control)
        for node in list(self.nodes.values()):
            self._tell(node, message)
        return len(self.nodes)

    def say_weights(self, name: str, word: weights.ToNode, data: Any) -> None:
        node = self.nodes.get(name)
        if node is not None:
            self._tell(node, wire.Weights(), [weights.encode(word)] if data is None else [weights.encode(word), data])

    def welcome(self, node: NodePeer, message: wire.Welcome) -> None:
        self._tell(node, message)

    def health(self) -> list[NodeHealth]:
        now = self._hub.now()
        return [
            NodeHealth(
                name=n.name, serving=n.serving, weights_version=n.weights_version, outstanding=self._outstanding(n.name),
                silent_s=now - n.last_seen, step_age_s=n.step_age_s, engine=n.stats,
            )
            for n in self.nodes.values()
        ]  # fmt: skip

    def _tell(self, node: NodePeer, message: msgspec.Struct, frames: list[Any] | None = None) -> None:
        result = self._hub.send(node.peer, message, frames or ())
        if result == "gone":
            self.peer_gone(node.peer)
        elif result == "stuck":
            self.peer_stuck(node.peer)


def _head(order: Order, params: int, pieces: list[tuple[int, int]]) -> wire.AssignHead:
    return wire.AssignHead(
        part=order.part, kind=order.kind, length=prompt_length(order.kind, order.prompt), params=params, seed_base=order.seed_base,
        samples=pieces, stream=order.stream,
    )  # fmt: skip
