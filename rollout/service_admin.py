"""The service's desk for administrators and publishers. In: frames of the admin socket. Out: operations, weights events, replies.

Every call is answered exactly once; roles are checked per command, deny by default.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from batchgen.errors import BatchGenError, ErrorInfo
from rollout import admin_wire as wire
from rollout.errors import ProtocolError
from rollout.results import Health, ServiceStats
from rollout.security import Role
from rollout.wire import HeaderDecoder, cut, encode
from weights_sync import events as sync
from weights_sync import messages as weights
from weights_sync.coordinator import held_by_pause

log = logging.getLogger("rollout.service")
_decoder = HeaderDecoder(wire.ToAdmin)
_encode = msgspec.msgpack.Encoder().encode


class Operations(Protocol):
    """What the service does on an administrator's word."""

    def pause(self) -> int: ...
    def resume(self) -> int: ...
    def abort_all(self) -> int: ...
    def shutdown(self, drain_s: float) -> int: ...
    def held_by_pause(self) -> int: ...
    def health(self) -> Health: ...
    def stats(self) -> ServiceStats: ...
    def count(self, name: str, times: int = 1) -> None: ...


class AdminDesk:
    """Answers the admin socket."""

    def __init__(
        self, operations: Operations, roles_of: Callable[[zmq.Frame], frozenset[Role]], sync_event: Callable[[sync.Event], None],
        send: Callable[[bytes, list[Any]], None],
    ):  # fmt: skip
        self._operations = operations
        self._roles_of = roles_of
        self._sync_event = sync_event
        self._send = send

    def receive(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        """One message. Never raises: a bad one is answered and counted."""
        message: Any = None
        try:
            if not 1 <= len(frames) <= 2:
                raise ProtocolError(f"an admin message has one header and at most one bulk frame, got {len(frames)} frames")
            message = _decoder.decode(frames[0].buffer)
            self._allow(message, self._roles_of(frames[0]))
            if isinstance(message, wire.AdminCall):
                self._call(peer, message)
            else:
                if isinstance(message, weights.Begin) and message.policy == "finish" and (held := self._operations.held_by_pause()):
                    raise BatchGenError(held_by_pause(held), code="paused")
                self._sync_event(sync.PublisherSaid(peer, message, frames[1] if len(frames) == 2 else None))
        except BatchGenError as error:
            self._refuse(peer, message, error.info())
        except Exception:
            log.exception("an admin message failed inside the service")
            self._refuse(peer, message, ErrorInfo(code="internal_error", message="the service failed on this message; its log says where"))

    def _allow(self, message: Any, roles: frozenset[Role]) -> None:
        allowed: frozenset[Role] = frozenset(("admin", "metrics") if isinstance(message, wire.READ_ONLY) else ("admin",))
        if not roles & allowed:
            needed = " or ".join(sorted(allowed))
            raise BatchGenError(f"this key may not use {type(message).__name__}; it needs the role {needed}", code="forbidden")

    def _call(self, peer: bytes, message: wire.AdminCall) -> None:
        do = self._operations
        match message:
            case wire.GetHealth():
                self._send(peer, [encode(wire.AdminAnswer(call=message.call)), _encode(do.health())])
                return
            case wire.GetStats():
                self._send(peer, [encode(wire.AdminAnswer(call=message.call)), _encode(do.stats())])
                return
            case wire.Pause():
                nodes = do.pause()
            case wire.Resume():
                nodes = do.resume()
            case wire.AbortAll():
                nodes = do.abort_all()
            case wire.Shutdown():
                nodes = do.shutdown(message.drain_s)
        self._send(peer, [encode(wire.Done(call=message.call, nodes=nodes))])

    def _refuse(self, peer: bytes, message: Any, error: ErrorInfo) -> None:
        self._operations.count(f"refused_admin_{error.code}")
        error = msgspec.structs.replace(error, message=cut(error.message))
        if isinstance(message, wire.AdminCall):
            self._send(peer, [encode(wire.Failure(call=message.call, error=error))])
        elif message is not None:
            failed = weights.Failed(
                update=getattr(message, "update", weights.NO_UPDATE), version=0, reasons=weights.short([error.message]), code=error.code,
                retryable=error.retryable,
            )  # fmt: skip
            self._send(peer, [weights.encode(failed)])
        else:
            self._send(peer, [weights.encode(weights.Refused(error=error))])
