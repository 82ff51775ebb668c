"""The blocking client: the asyncio client on a background thread. In and out: as client.py. No logic of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from os import getpid
from pathlib import Path
from typing import Any, Literal, TypeVar

from batchgen.events import ModelFacts
from batchgen.outputs import Group
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import Prompt
from rollout.calls import ProgressCallback
from rollout.client import AsyncRolloutClient, Handle
from rollout.errors import ClosedError
from rollout.results import Finished, Health, Progress, ServiceStats
from rollout.security import ClientKeys

T = TypeVar("T")


class SyncHandle:
    """A submitted prompt."""

    def __init__(self, client: "RolloutClient", handle: Handle):
        self._client, self._handle = client, handle

    def result(self, timeout_s: float | None = None) -> Group:
        """The group. DeadlineError after timeout_s (the request goes on), ServiceLostError."""
        return self._client._run(self._handle.result(timeout_s))

    def done(self) -> bool:
        return self._handle.done()

    def cancel(self) -> None:
        """End it: samples not finished come back with finish_reason `abort`."""
        self._client._loop.call_soon_threadsafe(self._handle.cancel)


class RolloutClient:
    """Use as `with RolloutClient("tcp://127.0.0.1:5757") as client:`. Methods and errors are AsyncRolloutClient's; any thread may call.

    `progress` callbacks run in the background thread.
    """

    def __init__(
        self, url: str = "tcp://127.0.0.1:5757", *, admin_url: str | None = None, keys: ClientKeys | str | Path | None = None,
        seed: int | None = None, name: str = "", connect_timeout_s: float = 10.0, service_timeout_s: float = 30.0,
        request_timeout_s: float = 3600.0,
    ):  # fmt: skip
        self._process = getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = self._run(
                _connect(
                    url, admin_url=admin_url, keys=keys, seed=seed, name=name, connect_timeout_s=connect_timeout_s,
                    service_timeout_s=service_timeout_s, request_timeout_s=request_timeout_s,
                )
            )  # fmt: skip
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> "RolloutClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the service drops this client's unfinished requests; calls that wait raise ClosedError."""
        if not self._closed and getpid() == self._process:
            self._run(self._client.close())
            self._stop()

    @property
    def url(self) -> str:
        return self._client.url

    @property
    def admin_url(self) -> str:
        return self._client.admin_url

    @property
    def model(self) -> ModelFacts | None:
        """Facts of the served model; None until the service has a node."""
        return self._client.model

    @property
    def weights_version(self) -> int:
        return self._client.weights_version

    @property
    def seed(self) -> int:
        return self._client.seed

    def wait_ready(self, timeout_s: float = 120.0) -> ModelFacts:
        return self._run(self._client.wait_ready(timeout_s))

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *,
        tools: list[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, timeout_s: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> list[Group]:  # fmt: skip
        """All groups, in the prompts' order."""
        work = self._client.generate(
            prompts, params, tools=tools, chat_template_kwargs=chat_template_kwargs, timeout_s=timeout_s, progress=progress
        )
        return self._run(work)

    def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | list[SamplingParams] | None = None, *,
        tools: list[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None, timeout_s: float | None = None,
        tokens: bool = True,
    ) -> Iterator[Progress | Finished]:  # fmt: skip
        """Events as they happen. Leaving the loop cancels the rest."""
        events = self._client.stream(
            prompts, params, tools=tools, chat_template_kwargs=chat_template_kwargs, timeout_s=timeout_s, tokens=tokens
        )
        try:
            while True:
                event = self._run(_next(events))
                if event is None:
                    return
                yield event
        finally:
            if not self._closed:
                self._run(_close(events))

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SyncHandle:  # fmt: skip
        return SyncHandle(self, self._run(self._client.submit(prompt, params, tools=tools, chat_template_kwargs=chat_template_kwargs)))

    def update_weights(
        self, named_tensors: Any, version: int, policy: Literal["finish", "abort", "continue"] = "finish", *, timeout_s: float = 300.0
    ) -> Any:
        """Push weights in place. The tensors are read in the calling thread."""
        from weights_sync.publisher import WeightPublisher

        return WeightPublisher(self).push(named_tensors, version, policy, timeout_s=timeout_s)

    def open_admin_channel(self) -> Any:
        """A blocking connection to the admin plane for a publisher; belongs to the thread that calls this."""
        return self._client.open_admin_channel()

    def pause(self) -> None:
        self._run(self._client.pause())

    def resume(self) -> None:
        self._run(self._client.resume())

    def abort_all(self) -> None:
        self._run(self._client.abort_all())

    def shutdown(self, drain_s: float = 0.0) -> None:
        self._run(self._client.shutdown(drain_s))

    def health(self, timeout_s: float = 10.0) -> Health:
        return self._run(self._client.health(timeout_s))

    def stats(self, timeout_s: float = 10.0) -> ServiceStats:
        return self._run(self._client.stats(timeout_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if getpid() != self._process:
            work.close()
            raise ClosedError("this client belongs to the process that made it and does not survive a fork; make a new one in this process")
        if self._closed:
            work.close()
            raise ClosedError("the client is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _connect(url: str, **options: Any) -> AsyncRolloutClient:
    client = AsyncRolloutClient(url, **options)
    await client.connect()
    return client


async def _next(events: Any) -> Progress | Finished | None:
    event: Progress | Finished | None = await anext(events, None)
    return event


async def _close(events: Any) -> None:
    await events.aclose()
