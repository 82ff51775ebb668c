"""How a publisher reaches the service. In: frames. Out: frames. Blocks the calling thread, always with a deadline; never decodes.

The client of the service makes the socket (it knows address, keys and socket options) and wraps it: `ZmqChannel(socket)`.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from batchgen.errors import WeightUpdateError


class Channel(Protocol):
    """One conversation with the service's admin plane."""

    def send(self, frames: Sequence[Any], timeout_s: float) -> None:
        """Hand over one message; a frame's memory must stay as it is until the service has answered for it. WeightUpdateError (code
        `service_lost`) when it cannot be handed over in time."""

    def recv(self, timeout_s: float) -> list[Any] | None:
        """The next message's frames; None when none came in time."""

    def close(self) -> None:
        """End the conversation. Messages not yet sent are dropped after a second."""


class HasAdminChannel(Protocol):
    """A client of the service: `RolloutClient`."""

    def open_admin_channel(self) -> Channel: ...


class ZmqChannel:
    """A connected DEALER socket, used by the thread that calls."""

    def __init__(self, socket: zmq.Socket[Any]):
        self._socket = socket

    def send(self, frames: Sequence[Any], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLOUT):
            raise WeightUpdateError(f"the service took no message for {timeout_s:g} s", code="service_lost", retryable=True)
        self._socket.setsockopt(zmq.SNDTIMEO, max(1, int((deadline - time.monotonic()) * 1000)))
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again:
            raise WeightUpdateError(f"the service took no message for {timeout_s:g} s", code="service_lost", retryable=True) from None

    def recv(self, timeout_s: float) -> list[Any] | None:
        if not self._socket.poll(max(0, int(timeout_s * 1000)), zmq.POLLIN):
            return None
        return list(self._socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        self._socket.close(linger=1000)
