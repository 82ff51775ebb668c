"""The client's side of the admin plane. In: calls. Out: answers. Runs in the client's loop; opens its socket on first use."""

import asyncio
from typing import Any

import zmq

from rollout import admin_wire as wire
from rollout import sockets
from rollout.errors import AdminError, ClosedError, ProtocolError, ServiceLostError
from rollout.security import ClientKeys
from rollout.wire import HeaderDecoder, encode

_decoder = HeaderDecoder(wire.FromAdmin)
OUTBOX_BYTES = 16 * 1024 * 1024


class AdminConnection:
    """Calls in flight are matched by number, so several may be open at once."""

    def __init__(self, context: zmq.Context[Any], url: str, keys: ClientKeys | None):
        self.url = url
        self._channel = sockets.Channel(
            sockets.dealer(context, url, keys=keys), outbox_bytes=OUTBOX_BYTES, on_message=self._receive, on_trouble=lambda *_: None
        )
        self._calls: dict[int, asyncio.Future[tuple[Any, list[zmq.Frame]]]] = {}
        self._next = 0

    async def call(self, message: wire.AdminCall, timeout_s: float) -> tuple[Any, list[zmq.Frame]]:
        """The answer and its frames. AdminError with the service's reason; ServiceLostError when none came in time."""
        message.call, self._next = self._next, self._next + 1
        future: asyncio.Future[tuple[Any, list[zmq.Frame]]] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = future
        self._channel.send(b"", [encode(message)])
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            what = type(message).__name__
            reason = f"no answer to {what} from {self.url} within {timeout_s:g} s; is it the admin address, and the key an admin's?"
            raise ServiceLostError(reason) from None
        finally:
            self._calls.pop(message.call, None)

    def close(self) -> None:
        self._channel.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(ClosedError("the client was closed during an admin call"))

    def _receive(self, _: bytes, frames: list[zmq.Frame]) -> None:
        try:
            message = _decoder.decode(frames[0].buffer)
        except ProtocolError:
            return  # an answer nobody can read is an answer that does not come: the call's deadline ends it
        future = self._calls.get(getattr(message, "call", -1))
        if future is None or future.done():
            return
        if isinstance(message, wire.Failure):
            future.set_exception(AdminError.of(message.error))
        else:
            future.set_result((message, frames[1:]))
