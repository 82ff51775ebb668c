"""A running service as a job's backend. In: a prompt and its sampling. Out: a Group. Never imports torch."""

from pathlib import Path

from batchgen.events import ModelFacts
from batchgen.outputs import Group
from batchgen.sampling_params import SamplingParams
from rollout.client import AsyncRolloutClient
from rollout.errors import ClosedError, ConnectError, DeadlineError, RolloutError, ServiceLostError
from rollout.jobs.batch_file import Prompt
from rollout.jobs.errors import BackendLost

FATAL_CODES = frozenset({"no_nodes", "draining"})
"""Errors of a sample that every other row would get as well."""


class ServiceBackend:
    """One client of the service; every row is a request of its own."""

    def __init__(self, url: str, *, keys: Path | None = None, connect_timeout_s: float = 10.0, request_timeout_s: float = 3600.0):
        self._client = AsyncRolloutClient(
            url, keys=keys, name="rollout run", connect_timeout_s=connect_timeout_s, request_timeout_s=request_timeout_s
        )

    async def start(self) -> ModelFacts:
        try:
            await self._client.connect()
            return await self._client.wait_ready()
        except (ConnectError, DeadlineError, ServiceLostError) as error:
            raise BackendLost(str(error)) from error

    async def generate(self, prompt: Prompt, params: SamplingParams) -> Group:
        try:
            group = (await self._client.generate([prompt], params))[0]
        except (ConnectError, ServiceLostError, ClosedError) as error:
            raise _lost(error) from error
        for sample in group.samples:
            if sample.error is not None and sample.error.code in FATAL_CODES:
                raise BackendLost(f"the service cannot go on: {sample.error.message}; run the same command again when it can")
        return group

    async def close(self) -> None:
        await self._client.close()


def _lost(error: RolloutError) -> BackendLost:
    return BackendLost(f"{error}; finished rows are kept, run the same command again when the service is back")
