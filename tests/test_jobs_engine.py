"""Jobs on a real engine in this process and on a real service, through the command line."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from job_fakes import read_rows, write_lines
from tiny_models import tiny_moe
from typer.testing import CliRunner

from batchgen import LLM, SamplingParams
from batchgen.llm import LLM as RealLLM
from rollout.cli import app
from rollout.jobs import EmbeddedBackend, Job, JobConfig, PlainReporter, ServiceBackend, Summary
from rollout.node import Node, NodeConfig
from rollout.service import Service, ServiceConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_moe(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture
def llm(folder: Path) -> Iterator[RealLLM]:
    yield LLM(str(folder), dtype="float32", kv_gb=0.01, num_threads=1)


def job(source: Path, output: Path, llm: Any, **fields: Any) -> Summary:
    config = JobConfig(input_path=source, output_path=output, **fields)
    return asyncio.run(Job(config, EmbeddedBackend(lambda: llm), PlainReporter(io.StringIO())).run())


def test_an_embedded_job_gives_what_the_engine_gives_and_finishes_rows_one_by_one(folder: Path, llm: RealLLM, tmp_path: Path) -> None:
    lengths = [40, 3, 20, 5, 60, 1]
    lines = [{"id": i, "prompt_token_ids": [i + 1, 2, 3], "max_tokens": length, "seed": i} for i, length in enumerate(lengths)]
    source = write_lines(tmp_path / "in.jsonl", *lines)
    sampling = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    summary = job(source, tmp_path / "out.jsonl", llm, sampling=sampling)
    rows = read_rows(tmp_path / "out.jsonl")
    assert summary.rows["succeeded"] == 6 and summary.finish_reasons == {"length": 6}
    assert [row["custom_id"] for row in rows][:2] == ["5", "1"]
    for index, length in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, seed=index)
        expected = llm.generate([[index + 1, 2, 3]], params)[0].samples[0]
        choice = next(row for row in rows if row["custom_id"] == str(index))["response"]["body"]["choices"][0]
        assert choice["token_ids"] == expected.token_ids and choice["text"] == expected.text
        assert choice["seed"] == str(expected.seed)


def test_rows_the_engine_refuses_are_error_rows(llm: RealLLM, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", "fine", {"prompt": [1, 99999]}, {"prompt": [1] * 300}, {"prompt": "x", "logit_bias": {"99999": 1}}
    )
    summary = job(source, tmp_path / "out.jsonl", llm, sampling={"max_tokens": 3})
    assert summary.rows["succeeded"] == 1
    assert sum(summary.errors.values()) == 3 and {"token_id_out_of_range", "prompt_too_long"} <= set(summary.errors)


def test_prompt_logprobs_and_top_logprobs_reach_the_result_row(llm: RealLLM, tmp_path: Path) -> None:
    line = {"prompt": "abc", "max_tokens": 2, "logprobs": 3, "prompt_logprobs": 1, "ignore_eos": True}
    job(write_lines(tmp_path / "in.jsonl", line), tmp_path / "out.jsonl", llm)
    row = read_rows(tmp_path / "out.jsonl")[0]
    logprobs = row["response"]["body"]["choices"][0]["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3] and len(logprobs["token_logprobs"]) == 2
    assert [value is None for value in row["provenance"]["prompt_logprobs"]] == [True, False, False]
    assert [len(top) for top in row["provenance"]["prompt_top_logprobs"]] == [0, 1, 1]


class FailingLLM:
    """An engine that breaks in its first step."""

    def __init__(self) -> None:
        self.engine = FakeEngine(on_step=self._fail)

    def encode(self, prompt: Any) -> list[int]:
        return [1]

    @staticmethod
    def _fail(engine: FakeEngine) -> None:
        raise RuntimeError("device gone")


def test_an_engine_that_breaks_stops_the_job_without_error_rows(tmp_path: Path) -> None:
    summary = job(write_lines(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl", FailingLLM())
    assert (summary.status, summary.exit_code, summary.rows["remaining"]) == ("backend_lost", 4, 2)
    assert "device gone" in (summary.message or "") and (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_job_runs_against_a_service_and_says_when_it_is_lost(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"id": i, "prompt": f"p{i}", "n": 2} for i in range(50)], {"id": "bad", "prompt": [5000]})

    async def scenario() -> tuple[Summary, Summary]:
        config = JobConfig(input_path=source, output_path=tmp_path / "out.jsonl", sampling={"max_tokens": 20})
        async with Service(ServiceConfig(url="tcp://127.0.0.1:0", admin_url="tcp://127.0.0.1:0")) as service:
            node = Node(NodeConfig(url=service.url, name="n"), FakeEngine)
            running = asyncio.create_task(node.run())
            first = await Job(config, ServiceBackend(service.url), PlainReporter(io.StringIO())).run()
            url = service.url
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        try:
            await Job(config, ServiceBackend(url, connect_timeout_s=0.3), PlainReporter(io.StringIO())).run()
        except Exception as error:
            return first, error  # type: ignore[return-value]
        raise AssertionError("a job ran without a service")

    first, second = asyncio.run(scenario())
    assert first.rows == {"total": 51, "succeeded": 50, "failed": 1, "remaining": 0, "cached": 0, "reused": 0}
    assert first.errors == {"token_out_of_range": 1} and first.finish_reasons == {"length": 100}
    assert getattr(second, "exit_code", None) == 4


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["run", *[str(argument) for argument in arguments]])


def test_the_command_runs_a_file_and_ends_with_the_summary_as_json(folder: Path, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, b"{", {"messages": [{"role": "user", "content": "hi"}], "id": "c"}
    )
    output = tmp_path / "out.jsonl"
    arguments = [sys.executable, "-m", "rollout.cli", "run", str(source), str(output), "--model", str(folder), "--max-tokens", "4"]
    arguments += ["--temperature", "0", "--kv-gb", "0.01", "--set", "ignore_eos=true", "--token-ids", "--num-threads", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "completed" and summary["rows"]["total"] == 3 and "3/3 rows" in done.stderr
    row = next(row for row in read_rows(output) if row["custom_id"] == "a")
    assert row["provenance"]["sampling"]["ignore_eos"] and len(row["response"]["body"]["choices"][0]["token_ids"]) == 4


def test_the_command_refuses_what_it_cannot_do_with_exit_code_2(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    unique = write_lines(tmp_path / "unique.jsonl", "x")
    output = tmp_path / "out.jsonl"
    cases = [
        ([source, output], "lines 1 and 2"),
        ([unique, unique], "is the input"),
        ([unique, output, "--model", tmp_path / "nowhere"], "nowhere"),
        ([unique, output, "--url", "tcp://127.0.0.1:1", "--model", "x"], "--model"),
        ([unique, output, "--url", "tcp://127.0.0.1:1", "--deterministic"], "--deterministic"),
        ([unique, output, "--set", "min_p"], "NAME=JSON"),
        ([unique, output, "--set", "stop=abc"], "is not JSON"),
        ([unique, output, "--set", "temprature=1"], "temprature"),
        ([unique, output, "--resume", "maybe"], "never, auto or must"),
        ([unique, output, "--temperature", "-1"], "temperature"),
    ]
    for arguments, says in cases:
        result = command(*arguments)
        assert result.exit_code == 2 and says in result.stderr, (arguments, result.output)
        assert not output.exists()
