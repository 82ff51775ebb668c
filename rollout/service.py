"""The service process: the hub between clients, nodes, administrators and the pure state machines. Asyncio; no torch, no engine.

In: messages of the public and the admin socket, the clock. Out: messages. Events go through one queue into the Router and the weights
Coordinator; their actions are carried out here, in order.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from batchgen.errors import BatchGenError, ErrorInfo
from rollout import limits as bounds
from rollout import router_types as rt
from rollout import security, sockets, wire
from rollout.errors import ProtocolError
from rollout.limits import PROTOCOL_VERSION, ServiceLimits
from rollout.results import Health, ServiceStats
from rollout.router import Router
from rollout.service_admin import AdminDesk
from rollout.service_clients import ClientDesk
from rollout.service_nodes import NodeDesk
from weights_sync import events as sync
from weights_sync.coordinator import Coordinator

log = logging.getLogger("rollout.service")
TICK_S = 0.1
SYNC_TICK_S = 0.5
STOP_S = 5.0
"""Longest wait for nodes to leave and outboxes to empty when stopping."""
_decoder = wire.HeaderDecoder(wire.ToService)
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Where a service listens and what it holds."""

    url: str = "tcp://127.0.0.1:5757"
    """Public plane: clients and nodes. Port 0 lets the system choose."""
    admin_url: str = "tcp://127.0.0.1:5758"
    """Admin plane: weights, pause, abort, shutdown."""
    node_url: str | None = None
    """Another address of the public plane, for nodes on this machine (ipc)."""
    keys: security.ServerKeys | None = None
    allow_remote: bool = False
    """Allow addresses that other machines can reach; needs keys."""
    limits: ServiceLimits = field(default_factory=ServiceLimits)

    def __post_init__(self) -> None:
        for url in (self.url, self.admin_url, self.node_url):
            if url is not None:
                security.check_bind(url, self.keys, self.allow_remote)


class Service:
    """Use as `async with Service(config) as service: await service.stopped()`."""

    def __init__(self, config: ServiceConfig):
        self.limits = config.limits
        self._config = config
        self._id = secrets.token_hex(16)
        self._router = Router(config.limits)
        self._coordinator = Coordinator()
        self._counters: Counter[str] = Counter()
        self._clients = ClientDesk(self)
        self._nodes = NodeDesk(self, self._sync_event, self._router.outstanding)
        self._admin = AdminDesk(self, self._roles_of, self._sync_event, self._send_admin)
        self._events: deque[rt.Event | sync.Event] = deque()
        self._working = False
        self._holding = False
        self._started = self.now()
        self._paused_at: float | None = None
        self._stop_by: float | None = None
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> "Service":
        """Bind and start. AddressInUseError, BadAddressError."""
        config = self._config
        self._context: zmq.Context[Any] = zmq.Context(io_threads=2)
        self._gate = security.Gate(self._context, config.keys)
        opened: list[zmq.Socket[Any]] = []
        try:
            for url, domain in ((config.url, security.PUBLIC_DOMAIN), (config.admin_url, security.ADMIN_DOMAIN)):
                opened.append(sockets.router(self._context, url, keys=config.keys, zap_domain=domain))
            self.url, self.admin_url = (str(one.getsockopt_string(zmq.LAST_ENDPOINT)) for one in opened)
            if config.node_url is not None:
                sockets.bind(opened[0], config.node_url)
        except BaseException:
            for one in opened:
                one.close(linger=0)
            self._gate.close()
            self._context.term()
            raise
        budget = self.limits.outbox_bytes
        public, admin = opened
        self._public_channel = sockets.Channel(public, outbox_bytes=budget, on_message=self._receive, on_trouble=self._public_trouble)
        self._admin_channel = sockets.Channel(admin, outbox_bytes=budget, on_message=self._admin.receive, on_trouble=self._admin_trouble)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._beat())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop: byes to clients, shutdown to nodes, then sockets, then the ZAP handler, then the context."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in list(self._clients.sessions.values()):
            if session.peer is not None:
                self.bye(session.peer, "service_stopped", "the service was stopped", True)
        self._nodes.control("shutdown")
        ends = self.now() + STOP_S
        while self.now() < ends and (self._nodes.nodes or not self._public_channel.idle()):  # noqa: ASYNC110 - sockets set no event
            await asyncio.sleep(0.02)
        self._public_channel.close()
        self._admin_channel.close()
        self._gate.close()
        await asyncio.to_thread(self._context.term)
        self._stopped.set()

    async def stopped(self) -> None:
        """Returns when a shutdown was asked for and is due."""
        await self._stopped.wait()

    # ---- the event queue ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic()

    def count(self, name: str, times: int = 1) -> None:
        self._counters[name] += times

    def route(self, event: rt.Event) -> None:
        """Give an event to the router; actions that cause further events queue them behind."""
        self._events.append(event)
        self._work()

    def _sync_event(self, event: sync.Event) -> None:
        self._events.append(event)
        self._work()

    def _work(self) -> None:
        if self._working:
            return
        self._working = True
        try:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, sync.Event):
                    for step in self._coordinator.handle(event, self.now()):
                        self._carry_out_sync(step)
                else:
                    for action in self._router.handle(event, self.now()):
                        self._carry_out(action)
                self._check_drained()
        finally:
            self._working = False

    def _check_drained(self) -> None:
        """While an update waits for running samples: tell it when there are none, or that a pause holds them."""
        if not self._holding:
            return
        if not any(self._router.outstanding(name) for name in self._nodes.nodes):
            self._holding = False
            self._events.append(sync.Drained())
        elif held := self.held_by_pause():
            self._events.append(sync.HeldByPause(held))

    def _carry_out(self, action: rt.Action) -> None:
        match action:
            case rt.AssignParts():
                self._nodes.assign(action)
            case rt.AbortParts():
                self._nodes.abort(action)
            case _:
                self._clients.carry_out(action)

    def _carry_out_sync(self, action: sync.Action) -> None:
        match action:
            case sync.SendNode():
                self._nodes.say_weights(action.node, action.message, action.data)
            case sync.SendPublisher():
                self._send_admin(action.peer, [_encode(action.message)] + ([] if action.data is None else [action.data]))
            case sync.HoldDispatch():
                self._holding = True
                self._events.appendleft(rt.Hold(True))  # ahead of what could still assign work after the update saw the nodes drained
            case sync.ReleaseDispatch():
                self._holding = False
                self._events.append(rt.Hold(False))
            case sync.SetServing():
                self._set_serving(action)
            case sync.VersionChanged():
                log.info("weights version is now %d", action.version)
                self._clients.broadcast(self.welcome())

    def _set_serving(self, action: sync.SetServing) -> None:
        node = self._nodes.nodes.get(action.node)
        if node is None:
            return
        node.serving = action.serving
        if not action.serving:
            self.count("nodes_set_aside")
            log.warning("node %s gets no work: %s", action.node, action.reason)
        self._events.append(rt.NodeServing(action.node, action.serving))
        self._nodes.welcome(node, self.welcome_node(action.serving))

    # ---- the public plane ---------------------------------------------------------------------------------------------

    def _receive(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        """One message. Never raises: whoever sent a bad one is told and expelled."""
        try:
            self._read(peer, frames)
        except BatchGenError as error:
            self.count(f"protocol_errors_{error.code}")
            self._expel(peer, error.info())
        except Exception:
            self.count("internal_errors")
            log.exception("a message failed inside the service")
            self._expel(peer, ErrorInfo(code="internal_error", message="the service failed on this message; its log says where"))

    def _read(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        if not 1 <= len(frames) <= 1 + bounds.MAX_FRAMES:
            raise ProtocolError(f"a message has one header and at most {bounds.MAX_FRAMES} bulk frames, got {len(frames)} frames")
        message = _decoder.decode(frames[0].buffer)
        if isinstance(message, wire.Hello | wire.NodeHello):
            self._hello(peer, message, self._gate.user(frames[0]))
            return
        session, node = self._clients.session_of(peer), self._nodes.node_of(peer)
        if session is None and node is None:
            if not isinstance(message, wire.Bye):
                self.count("messages_without_session")
                self.bye(peer, "unknown_session", "say hello first; the service does not know this connection", True)
        elif isinstance(message, wire.Ping):
            if session is not None:
                session.last_seen = self.now()
            self.send(peer, wire.Pong(sent=message.sent, step_age_s=self._step_age()))
        elif isinstance(message, wire.Query) and session is not None:
            session.last_seen = self.now()
            self.send(peer, wire.Answer(call=message.call), [_encode(self.health() if message.what == "health" else self.stats())])
        elif session is not None:
            self._clients.handle(session, message, [frame.buffer for frame in frames[1:]])
        elif node is not None:
            self._nodes.handle(node, message, frames[1:])

    def _hello(self, peer: bytes, message: wire.Hello | wire.NodeHello, user: str) -> None:
        is_client = isinstance(message, wire.Hello)
        if message.version != PROTOCOL_VERSION:
            self.bye(peer, "version_mismatch", f"this service speaks protocol version {PROTOCOL_VERSION}, the peer {message.version}")
        elif ("submit" if is_client else "node") not in self._gate.roles(user):
            self.count("refused_roles")
            self.bye(peer, "forbidden", f"this key has not the role {'submit' if is_client else 'node'}")
        elif isinstance(message, wire.Hello):
            if self._nodes.node_of(peer) is None:
                self._clients.hello(peer, message, user)
            else:
                self.bye(peer, "protocol_error", "this connection belongs to a node")
        elif self._clients.session_of(peer) is not None:
            self.bye(peer, "protocol_error", "this connection belongs to a client")
        else:
            first = self._nodes.model is None
            if self._nodes.hello(peer, message, user) and first:
                self._clients.broadcast(self.welcome())

    def _expel(self, peer: bytes, error: ErrorInfo) -> None:
        session, node = self._clients.session_of(peer), self._nodes.node_of(peer)
        if session is not None:
            self._clients.drop(session, error.code, error.message)
        elif node is not None:
            self._nodes.lose(node, error.code, error.message)
        else:
            self.bye(peer, error.code, error.message)

    def _public_trouble(self, peer: bytes, result: sockets.SendResult) -> None:
        self.count(f"peers_{result}")
        self._clients.peer_gone(peer)
        self._nodes.peer_gone(peer)

    def send(self, peer: bytes, message: msgspec.Struct, frames: Iterable[Any] = ()) -> sockets.SendResult:
        return self._public_channel.send(peer, [wire.encode(message), *frames])

    def send_frames(self, peer: bytes, frames: list[Any]) -> sockets.SendResult:
        return self._public_channel.send(peer, frames)

    def bye(self, peer: bytes, code: str, reason: str, retryable: bool = False) -> None:
        """Say why, if the peer still listens, and drop what waits for it."""
        self._public_channel.forget(peer)
        self.send(peer, wire.Bye(error=ErrorInfo(code=code, message=wire.cut(reason), retryable=retryable)))

    def welcome(self, resumed: bool = False) -> wire.Welcome:
        return self._welcome(self.limits.client_timeout_s, resumed=resumed)

    def welcome_node(self, serving: bool) -> wire.Welcome:
        return self._welcome(self.limits.node_timeout_s, serving=serving)

    def _welcome(self, timeout_s: float, *, resumed: bool = False, serving: bool = True) -> wire.Welcome:
        port = self.admin_url.rpartition(":")[2]
        return wire.Welcome(
            version=PROTOCOL_VERSION, service=self._id, heartbeat_s=self.limits.heartbeat_s, timeout_s=timeout_s,
            credits=self.limits.credits, resumed=resumed, model=self._nodes.model, weights_version=self._coordinator.version or 0,
            serving=serving, admin_port=int(port) if port.isdigit() else 0,
        )  # fmt: skip

    # ---- operations (admin plane) ---------------------------------------------------------------------------------------

    def _send_admin(self, peer: bytes, frames: list[Any]) -> None:
        result = self._admin_channel.send(peer, frames)
        if result in ("gone", "stuck"):
            self._admin_trouble(peer, result)

    def _admin_trouble(self, peer: bytes, _: sockets.SendResult) -> None:
        self.count("admin_replies_dropped")
        self._sync_event(sync.PublisherLeft(peer))

    def _roles_of(self, frame: zmq.Frame) -> frozenset[security.Role]:
        return self._gate.roles(self._gate.user(frame))

    def pause(self) -> int:
        self._paused_at = self._paused_at or self.now()
        self._nodes.paused = True
        return self._nodes.control("pause")

    def held_by_pause(self) -> int:
        """Unfinished samples at nodes while generation is paused; 0 when it is not."""
        return sum(self._router.outstanding(name) for name in self._nodes.nodes) if self._paused_at is not None else 0

    def resume(self) -> int:
        self._paused_at, self._nodes.paused = None, False
        return self._nodes.control("resume")

    def abort_all(self) -> int:
        self.route(rt.AbortedAll())
        return len(self._nodes.nodes)

    def shutdown(self, drain_s: float) -> int:
        """Refuse new requests; stop when nothing is open, or after drain_s."""
        self._router.draining = True
        self._stop_by = self.now() + drain_s
        self._clients.broadcast(wire.Drain())
        return len(self._nodes.nodes)

    def health(self) -> Health:
        nodes = self._nodes.health()
        status, message = "ok", f"{sum(n.serving for n in nodes)} nodes serve"
        if not any(node.serving for node in nodes):
            status, message = "no_nodes", "no node serves; start one with `rollout node`, or push weights if one is set aside"
        elif self._router.draining:
            status, message = "draining", "the service is shutting down"
        elif self._coordinator.phase is not None:
            status, message = "updating", self._coordinator.phase.value
        elif self._paused_at is not None:
            status, message = "paused", f"generation has been paused for {self.now() - self._paused_at:.1f} s"
        return Health(
            status=status, message=message, model=self._nodes.model, weights_version=self._coordinator.version or 0,
            paused_s=None if self._paused_at is None else self.now() - self._paused_at, nodes=nodes, lost_nodes=list(self._nodes.lost),
            step_age_s=self._step_age(),
        )  # fmt: skip

    def stats(self) -> ServiceStats:
        self._counters["handshakes_refused"] = self._gate.refused
        return ServiceStats(
            uptime_s=self.now() - self._started, weights_version=self._coordinator.version or 0, clients=len(self._clients.sessions),
            nodes=self._nodes.health(), queued_requests=self._router.queued_works, open_requests=self._router.open_requests,
            open_bytes=self._router.open_bytes, counters=dict(self._counters + self._router.counters),
        )  # fmt: skip

    def _step_age(self) -> float | None:
        return max((n.step_age_s for n in self._nodes.nodes.values() if n.step_age_s is not None), default=None)

    # ---- time ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        next_sync = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            self._safely(self.route, rt.Tick())
            if self.now() >= next_sync:
                next_sync = self.now() + SYNC_TICK_S
                self._safely(self._sync_event, sync.Tick())
            if self._stop_by is not None and (self._router.open_requests == 0 or self.now() >= self._stop_by):
                self._stopped.set()

    async def _beat(self) -> None:
        while True:
            due = self.now() + self.limits.heartbeat_s
            await asyncio.sleep(self.limits.heartbeat_s)
            if (late_s := self.now() - due) > self.limits.heartbeat_s:
                self._excuse(late_s)
            self._safely(self._clients.beat)
            self._safely(self._nodes.beat)

    def _excuse(self, late_s: float) -> None:
        """This process was stopped or busy: the peers' silence meanwhile was ours."""
        self.count("late_heartbeats")
        log.warning("the service's loop was late by %.1f s", late_s)
        for session in self._clients.sessions.values():
            session.last_seen += late_s
        for node in self._nodes.nodes.values():
            node.last_seen += late_s

    def _safely(self, step: Callable[..., None], *arguments: Any) -> None:
        """The clock goes on whatever a step meets."""
        try:
            step(*arguments)
        except Exception:
            self.count("internal_errors")
            log.exception("a timed step failed inside the service")
