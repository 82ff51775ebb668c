"""The service's desk for clients. In: decoded messages of client connections. Out: router events, and replies through the hub.

Holds the sessions; knows nothing of nodes.
"""

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from batchgen.errors import ErrorInfo
from rollout import limits, wire
from rollout.batches import decode_params, split
from rollout.errors import ProtocolError
from rollout.limits import ServiceLimits
from rollout.router_types import (
    Accepted,
    Cancelled,
    ClientJoined,
    ClientLost,
    Deliver,
    Event,
    NewRequest,
    ParamsRef,
    Refused,
    Repeated,
    Retired,
    Submitted,
)
from rollout.session import Session
from rollout.sockets import SendResult

log = logging.getLogger("rollout.service")
PARAMS_CACHE = 4096
PARAMS_CACHE_BYTES = 4096


class Hub(Protocol):
    """What desks need from the service."""

    limits: ServiceLimits

    def now(self) -> float: ...
    def count(self, name: str, times: int = 1) -> None: ...
    def route(self, event: Event) -> None: ...
    def send(self, peer: bytes, message: msgspec.Struct, frames: Iterable[Any] = ()) -> SendResult: ...
    def send_frames(self, peer: bytes, frames: list[Any]) -> SendResult: ...
    def bye(self, peer: bytes, code: str, reason: str, retryable: bool = False) -> None: ...
    def welcome(self, resumed: bool) -> wire.Welcome: ...
    def welcome_node(self, serving: bool) -> wire.Welcome: ...


class ClientDesk:
    """Sessions by key (the client's session id) and by connection."""

    def __init__(self, hub: Hub):
        self._hub = hub
        self.sessions: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._params: dict[bytes, ParamsRef] = {}

    def session_of(self, peer: bytes) -> Session | None:
        return self._by_peer.get(peer)

    # ---- coming and going ---------------------------------------------------------------------------------------------

    def hello(self, peer: bytes, hello: wire.Hello, user: str) -> None:
        hub, now = self._hub, self._hub.now()
        session = self.sessions.get(hello.session)
        if session is not None and session.user != user:
            hub.count("refused_session_theft")
            hub.bye(peer, "forbidden", "this session belongs to another key")
            return
        if session is None and len(self.sessions) >= hub.limits.max_clients:
            hub.count("refused_clients")
            hub.bye(peer, "too_many_clients", f"the service has {len(self.sessions)} clients, its limit is {hub.limits.max_clients}", True)
            return
        current = self._by_peer.get(peer)
        if current is not None and current is not session:
            hub.bye(peer, "protocol_error", "this connection already has another session; use one connection for each")
            return
        resumed = session is not None
        if session is None:
            session = self.sessions[hello.session] = Session(hello.session, user, hello.name, peer, now)
            hub.route(ClientJoined(session.key))
            log.info("client %s joined (%s)", session.key[:8], hello.name or "unnamed")
        elif session.peer is not None and session.peer != peer:
            self._by_peer.pop(session.peer, None)
            hub.bye(session.peer, "replaced", "the same session said hello on another connection")
        session.connect(peer, now)
        self._by_peer[peer] = session
        if resumed:
            hub.count("resumed_sessions")
        self._send(session, [wire.encode(hub.welcome(resumed))])
        for frames in session.unacked():
            hub.count("resent_results")
            self._send(session, frames)

    def drop(self, session: Session, code: str, reason: str, retryable: bool = False) -> None:
        """End a session: its work is aborted and its memory freed."""
        if self.sessions.pop(session.key, None) is None:
            return
        self._hub.count(f"dropped_clients_{code}")
        left = code == "client_left"
        (log.info if left else log.warning)("client %s dropped: %s (%s)", session.key[:8], code, reason)
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
            if not left:
                self._hub.bye(session.peer, code, reason, retryable)
        self._hub.route(ClientLost(session.key))

    def peer_gone(self, peer: bytes) -> None:
        """The connection is closed; the session waits a while for its client."""
        session = self._by_peer.pop(peer, None)
        if session is not None:
            session.disconnect(self._hub.now())

    def beat(self) -> None:
        """Ping every client, so that closed connections are noticed, and drop the dead."""
        now, hub = self._hub.now(), self._hub
        for session in list(self.sessions.values()):
            if session.peer is not None:
                self._send(session, [wire.encode(wire.Ping(sent=now))])
            if session.gone(now, hub.limits.client_timeout_s, hub.limits.reconnect_grace_s):
                self.drop(session, "client_lost", f"nothing was heard for {now - session.last_seen:.1f} s")

    def broadcast(self, message: msgspec.Struct) -> None:
        frames = [wire.encode(message)]
        for session in list(self.sessions.values()):
            self._send(session, frames)

    # ---- messages -----------------------------------------------------------------------------------------------------

    def handle(self, session: Session, message: Any, frames: list[Any]) -> None:
        """A message of a known session. ProtocolError when its frames are not what its header says."""
        session.last_seen = self._hub.now()
        match message:
            case wire.Submit():
                self._submit(session, message, frames)
            case wire.Ack():
                session.ack(message.seq)
                if message.floor:
                    self._hub.route(Retired(session.key, message.floor))
            case wire.Cancel():
                self._hub.route(Cancelled(session.key, message.requests))
            case wire.Pong():
                pass
            case wire.Bye():
                self.drop(session, "client_left", "the client said bye")
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a client's message")

    def _submit(self, session: Session, message: wire.Submit, frames: list[Any]) -> None:
        try:
            encoded, prompts = split(message.requests, frames)
        except ProtocolError as error:
            self._refuse(session, [head.id for head in message.requests], error.info())
            return
        table: list[ParamsRef | ErrorInfo] = [self._params_ref(one) for one in encoded]
        requests = []
        for head, prompt in zip(message.requests, prompts, strict=True):
            params = table[head.params]
            if isinstance(params, ErrorInfo):
                self._refuse(session, [head.id], params)
                continue
            requests.append(NewRequest(head.id, head.kind, prompt, params, head.seed_base, head.timeout_s, head.stream))
        self._hub.route(Submitted(session.key, requests))

    def _params_ref(self, encoded: bytes) -> ParamsRef | ErrorInfo:
        known = self._params.get(encoded)
        if known is None:
            try:
                params = decode_params(encoded)
            except ProtocolError as error:
                return error.info()
            known = ParamsRef(encoded, params.n, params.logprobs_mode)
            if len(encoded) <= PARAMS_CACHE_BYTES:
                if len(self._params) >= PARAMS_CACHE:
                    self._params.clear()
                self._params[encoded] = known
        return known

    def _refuse(self, session: Session, ids: list[int], error: ErrorInfo) -> None:
        self._hub.count(f"rejected_{error.code}", len(ids))
        error = msgspec.structs.replace(error, message=wire.cut(error.message))
        self._send(session, [wire.encode(wire.Reject(requests=ids, error=error))])

    # ---- router actions -----------------------------------------------------------------------------------------------

    def carry_out(self, action: Accepted | Refused | Repeated | Deliver) -> None:
        session = self.sessions.get(action.client)
        if session is None:
            return
        match action:
            case Deliver():
                for frames in session.pack(action.items):
                    self._send(session, frames)
                if session.unacked_bytes > self._hub.limits.outbox_bytes:
                    reason = f"{session.unacked_bytes} bytes of results wait for an ack, the limit is {self._hub.limits.outbox_bytes}"
                    self.drop(session, "slow_reader", reason)
            case Accepted():
                for start in range(0, len(action.requests), limits.MAX_IDS_PER_MESSAGE):
                    part = action.requests[start : start + limits.MAX_IDS_PER_MESSAGE]
                    self._send(session, [wire.encode(wire.Accept(requests=part))])
            case Refused():
                reject = wire.Reject(requests=action.requests, error=action.error, retry_after_s=action.retry_after_s)
                self._send(session, [wire.encode(reject)])
            case Repeated():
                self._repeat(session, action.request)

    def _repeat(self, session: Session, request: int) -> None:
        held = session.holding(request)
        if not held:
            reason = f"request {request} is finished and its results were acknowledged; a new request needs a new id"
            self._refuse(session, [request], ErrorInfo(code="already_finished", message=reason))
            return
        self._hub.count("repeated_results")
        for frames in [[wire.encode(wire.Accept(requests=[request]))], *held]:
            self._send(session, frames)

    def _send(self, session: Session, frames: list[Any]) -> None:
        if session.peer is None:
            return
        result = self._hub.send_frames(session.peer, frames)
        if result == "gone":
            self.peer_gone(session.peer)
        elif result == "stuck":
            self.drop(session, "slow_reader", f"more than {self._hub.limits.outbox_bytes} bytes wait to be sent")
