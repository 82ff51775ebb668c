"""Every ZeroMQ socket is made and driven here. In: addresses, keys, limits. Out: sockets, Channel. Never decodes a message.

A Channel belongs to the asyncio loop (one thread) that made it. Sends never block and are never dropped silently: what the kernel does
not take yet waits in a per-peer outbox with a byte budget; over the budget the peer is reported as stuck, without a connection as gone.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from os import getpid
from threading import get_ident
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq

from rollout import limits
from rollout.errors import RolloutError
from rollout.security import ClientKeys, ServerKeys

SEND_HWM = 64
"""Messages libzmq may hold per peer; bytes are bounded by the outbox."""
RECV_HWM = 16
"""Messages libzmq may read ahead of us per peer; each frame may have limits.MAX_ITEM_BYTES."""
RETRY_S = 0.005
"""A ROUTER cannot tell when a full peer has room again: try this often."""
BATCH = 256
"""Messages read before other tasks of the loop get a turn."""

Frames = Sequence[Any]


class AddressInUseError(RolloutError):
    """Another process listens on that port."""

    code = "address_in_use"


class BadAddressError(RolloutError, ValueError):
    """An address that cannot be bound or connected to."""

    code = "bad_address"


def router(context: zmq.Context[Any], url: str, *, keys: ServerKeys | None, zap_domain: str) -> zmq.Socket[Any]:
    """A bound ROUTER. AddressInUseError, BadAddressError."""
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, zap_domain)
    try:
        bind(socket, url)
    except RolloutError:
        socket.close()
        raise
    return socket


def bind(socket: zmq.Socket[Any], url: str) -> None:
    """Let a ROUTER listen on one more address. AddressInUseError, BadAddressError."""
    check_url(url)
    try:
        socket.bind(url)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"{url} is already taken; stop the other service or choose another port") from None
        raise BadAddressError(f"cannot listen on {url}: {error.strerror}") from None


def dealer(context: zmq.Context[Any], url: str, *, keys: ClientKeys | None) -> zmq.Socket[Any]:
    """A DEALER that connects, and reconnects by itself, to url. BadAddressError."""
    check_url(url)
    socket = _socket(context, zmq.DEALER)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    try:
        socket.connect(url)
    except zmq.ZMQError as error:
        socket.close()
        raise BadAddressError(f"cannot connect to {url}: {error.strerror}") from None
    return socket


def check_url(url: str) -> None:
    """BadAddressError unless it is tcp://host:port or ipc://path; libzmq itself wraps port numbers that are too large."""
    try:
        parts = urlsplit(url)
        good = (
            bool(parts.hostname and parts.port is not None) if parts.scheme == "tcp" else parts.scheme == "ipc" and len(url) > len("ipc://")
        )
    except ValueError:
        good = False
    if not good:
        raise BadAddressError(f"{url!r} is not an address; expected tcp://host:port with a port up to 65535, or ipc://path")


def _socket(context: zmq.Context[Any], kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 200),
        (zmq.SNDHWM, SEND_HWM),
        (zmq.RCVHWM, RECV_HWM),
        (zmq.MAXMSGSIZE, limits.MAX_ITEM_BYTES),
        (zmq.HEARTBEAT_IVL, 5000),
        (zmq.HEARTBEAT_TIMEOUT, 20000),
        (zmq.HEARTBEAT_TTL, 20000),
        (zmq.HANDSHAKE_IVL, 5000),
        (zmq.RECONNECT_IVL, 50),
        (zmq.RECONNECT_IVL_MAX, 1000),
        (zmq.IPV6, 0),
    ):
        socket.setsockopt(option, value)
    return socket


class Outbox:
    """Messages for one peer that libzmq has not taken yet."""

    __slots__ = ("messages", "num_bytes")

    def __init__(self) -> None:
        self.messages: deque[tuple[Frames, int]] = deque()
        self.num_bytes = 0


SendResult = Literal["sent", "waiting", "gone", "stuck"]


class Channel:
    """A socket driven by the running loop.

    on_message(peer, frames) is called for every message; peer is the routing id on a ROUTER and b"" on a DEALER.
    on_trouble(peer, "gone" | "stuck") is called when queued messages had to be dropped with their peer.
    """

    def __init__(
        self, socket: zmq.Socket[Any], *, outbox_bytes: int, on_message: Callable[[bytes, list[zmq.Frame]], None],
        on_trouble: Callable[[bytes, SendResult], None],
    ):  # fmt: skip
        self._socket = socket
        self._routes = socket.type == zmq.ROUTER
        self._outbox_bytes = outbox_bytes
        self._on_message = on_message
        self._on_trouble = on_trouble
        self._outboxes: dict[bytes, Outbox] = {}
        self._loop = asyncio.get_running_loop()
        self._thread, self._process = get_ident(), getpid()
        self._retry: asyncio.TimerHandle | None = None
        self._pump_due = False
        self.closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._pump)
        self._schedule()

    def send(self, peer: bytes, frames: Frames) -> SendResult:
        """Send now or queue in order behind what already waits. `gone` and `stuck` drop this message and all that wait."""
        self._own()
        if self.closed:
            return "gone"
        outbox = self._outboxes.get(peer)
        if outbox is None:
            result = self._try(peer, frames)
            if result != "waiting":
                return result
            outbox = self._outboxes[peer] = Outbox()
        size = sum(len(frame) for frame in frames)
        if outbox.num_bytes + size > self._outbox_bytes:
            del self._outboxes[peer]
            return "stuck"
        outbox.messages.append((frames, size))
        outbox.num_bytes += size
        self._arm()
        return "waiting"

    def waiting_bytes(self, peer: bytes) -> int:
        outbox = self._outboxes.get(peer)
        return 0 if outbox is None else outbox.num_bytes

    def idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._outboxes

    def forget(self, peer: bytes) -> None:
        """Drop what waits for a peer."""
        self._outboxes.pop(peer, None)

    def close(self, linger_ms: int = 200) -> None:
        self._own()
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close(linger=linger_ms)

    def _own(self) -> None:
        if get_ident() != self._thread or getpid() != self._process:
            raise RuntimeError("a socket was used from a thread or process that does not own it")

    def _try(self, peer: bytes, frames: Frames) -> SendResult:
        message = [peer, *frames] if self._routes else list(frames)
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)  # pyzmq still copies frames under 64 KiB: that is faster
        except zmq.Again:
            return "waiting"
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                return "gone"
            raise
        self._schedule()
        return "sent"

    def _schedule(self) -> None:
        # The descriptor is edge-triggered: after any send or partial read, events may be pending without a new edge.
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _arm(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._flush)

    def _flush(self) -> None:
        self._retry = None
        if self.closed:
            return
        for peer in list(self._outboxes):
            outbox = self._outboxes[peer]
            while outbox.messages:
                frames, size = outbox.messages[0]
                result = self._try(peer, frames)
                if result == "waiting":
                    break
                if result == "gone":
                    self._outboxes.pop(peer, None)
                    self._on_trouble(peer, "gone")
                    break
                outbox.messages.popleft()
                outbox.num_bytes -= size
            else:
                self._outboxes.pop(peer, None)
        if self._outboxes:
            self._arm()

    def _pump(self) -> None:
        self._pump_due = False
        if self.closed:
            return
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = b""
            if self._routes:
                peer = frames.pop(0).bytes
            try:
                self._on_message(peer, frames)
            except BaseException:
                self._schedule()  # the loop reports the error; the messages behind this one are read all the same
                raise
            if self.closed:
                return
        else:
            self._schedule()
        if self._outboxes and not self._routes:
            self._flush()
