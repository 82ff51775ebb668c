"""A scripted backend for job tests, and a program that runs a job with it so that tests can kill it.

python tests/job_fakes.py INPUT OUTPUT [JobConfig fields as JSON] [seconds a row]
"""

import asyncio
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from batchgen.errors import RequestError
from batchgen.events import ModelFacts
from batchgen.outputs import Group, Sample
from batchgen.request import sample_seed
from batchgen.sampling_params import SamplingParams
from rollout.jobs import BackendLost, Job, JobConfig, PlainReporter, Summary
from rollout.jobs.cli import run

FACTS = ModelFacts(
    name="fake",
    architecture="Fake",
    fingerprint="f0",
    vocab_size=256,
    max_model_len=64,
    eos_token_ids=[0],
    num_layers=1,
    num_experts=1,
    num_experts_per_tok=1,
    dtype="float32",
    deterministic=True,
)


class FakeBackend:
    """Tokens depend on prompt and seed only. Prompts that begin with `fail`, `flaky`, `lost`, `hang` or `half` behave so."""

    def __init__(self, row_s: float = 0.0, facts: ModelFacts = FACTS):
        self.row_s = row_s
        self.facts = facts
        self.calls: list[Any] = []
        self.in_flight = self.most_in_flight = 0
        self.closed = False

    async def start(self) -> ModelFacts:
        return self.facts

    async def generate(self, prompt: Any, params: SamplingParams) -> Group:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        tries = self.calls.count(text)
        self.calls.append(text)
        self.in_flight += params.n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            spread = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] / 128
            await asyncio.sleep(3600 if text.startswith("hang") else self.row_s * spread)
        finally:
            self.in_flight -= params.n
        if text.startswith("fail"):
            raise RequestError("scripted failure", code="scripted")
        if text.startswith("flaky") and tries == 0:
            raise RequestError("try again", code="busy", retryable=True)
        if text.startswith("lost"):
            raise BackendLost("the fake is gone")
        samples = [self._sample(text, params, i) for i in range(params.n)]
        if text.startswith("half"):
            samples[0] = Sample(
                index=0,
                token_ids=[],
                logprobs=[],
                text="",
                finish_reason="error",
                seed=0,
                weights_versions=[],
                error=RequestError("NaN logits", code="nan_logits").info(),
            )
        return Group(request_id="r", prompt_token_ids=list(text.encode()), samples=samples, logprobs_mode="processed")

    async def close(self) -> None:
        self.closed = True

    def _sample(self, text: str, params: SamplingParams, index: int) -> Sample:
        assert params.seed is not None
        seed = sample_seed(params.seed, index)
        ids = list(hashlib.blake2b(f"{text}{seed}".encode(), digest_size=min(params.max_tokens, 8)).digest())
        return Sample(
            index=index,
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            text=bytes(ids).hex(),
            finish_reason="length" if len(ids) == params.max_tokens else "stop",
            seed=seed,
            weights_versions=[(1, 0, len(ids))],
        )


def run_job(input_path: Path, output_path: Path, backend: FakeBackend | None = None, **fields: Any) -> Summary:
    """One run, to its end."""
    config = JobConfig(input_path=input_path, output_path=output_path, **fields)
    job = Job(config, backend or FakeBackend(), PlainReporter(io.StringIO()))
    return asyncio.run(job.run())


def write_lines(path: Path, *lines: Any) -> Path:
    """A JSONL file; bytes are written as they are."""
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


if __name__ == "__main__":
    extra = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    row_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    try:
        config = JobConfig(input_path=Path(sys.argv[1]), output_path=Path(sys.argv[2]), **extra)
        summary = asyncio.run(run(config, FakeBackend(row_s)))
    except ValueError as refused:
        sys.exit(f"refused: {refused}")
    print(json.dumps({"status": summary.status, "message": summary.message, "rows": summary.rows}))
    sys.exit(summary.exit_code)
