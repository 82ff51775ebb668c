"""A job answers every row exactly once, whatever the rows are."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from job_fakes import FakeBackend, read_rows, run_job, write_lines
from rich.console import Console

from batchgen.events import ModelFacts
from rollout.jobs import Job, JobConfig, JobInterrupted, JobRefused, PlainReporter
from rollout.jobs import runner as runner_module
from rollout.jobs.progress import BarReporter


def test_every_row_gets_one_result_with_its_id_and_provenance(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "one", "n": 2, "logprobs": True, "return_token_ids": True, "metadata": {"k": 1 << 80}},
        {"id": "b", "messages": [{"role": "user", "content": "two"}], "logprobs": True},
        "three",
    )
    summary = run_job(source, tmp_path / "out.jsonl", sampling={"max_tokens": 4})
    rows = {row["custom_id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert summary.status == "completed" and summary.exit_code == 0
    assert summary.rows == {"total": 3, "succeeded": 3, "failed": 0, "remaining": 0, "cached": 0, "reused": 0}
    assert summary.finish_reasons == {"length": 4} and summary.weights_versions == {1: 16}
    body = rows["a"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["token_ids"] != body["choices"][1]["token_ids"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11, "cached_prompt_tokens": 0}
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 4
    assert rows["a"]["metadata"] == {"k": 1 << 80} and rows["a"]["error"] is None
    assert rows["a"]["provenance"]["model_fingerprint"] == "f0" and rows["a"]["provenance"]["prompt_token_ids"] == list(b"one")
    answer = rows["b"]["response"]["body"]
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
    assert len(answer["choices"][0]["logprobs"]["content"]) == 4 and answer["choices"][0]["token_ids"] is None


def test_all_result_rows_have_the_same_fields(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "one", "fail", b"{", {"messages": [{"role": "user", "content": "x"}]})
    run_job(source, tmp_path / "out.jsonl")
    rows = read_rows(tmp_path / "out.jsonl")
    assert len({tuple(row) for row in rows}) == 1
    assert len({tuple(row["provenance"]) for row in rows}) == 1
    assert len({tuple(row["response"]["body"]["choices"][0]) for row in rows if row["response"]}) == 1


def test_bad_rows_are_error_rows_and_can_be_fed_back(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl", "good", {"prompt": "x", "temprature": 1}, b'{"prompt": NaN}', "fail now", {"prompt": "half", "n": 2}
    )
    summary = run_job(source, tmp_path / "out.jsonl")
    rows = read_rows(tmp_path / "out.jsonl")
    assert summary.exit_code == 0 and summary.rows["failed"] == 4 and summary.rows["succeeded"] == 1
    assert summary.errors == {"invalid_request": 1, "invalid_json": 1, "scripted": 1, "partial": 1}
    partial = next(row for row in rows if row["error"] and row["error"]["code"] == "partial")
    assert [choice["finish_reason"] for choice in partial["response"]["body"]["choices"]] == ["error", "stop"]
    again = run_job(tmp_path / "out.failed.jsonl", tmp_path / "again.jsonl")
    assert again.rows["total"] == 4
    ids = {row["provenance"]["line"]: row["custom_id"] for row in rows}
    fed_back = [row["custom_id"] for row in sorted(read_rows(tmp_path / "again.jsonl"), key=lambda row: row["provenance"]["line"])]
    assert [fed_back[0], fed_back[2], fed_back[3]] == [ids[2], ids[4], ids[5]]


def test_no_failed_file_is_left_when_nothing_failed(tmp_path: Path) -> None:
    (tmp_path / "out.failed.jsonl").write_text("stale\n")
    summary = run_job(write_lines(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl")
    assert summary.failed_output is None and not (tmp_path / "out.failed.jsonl").exists()


def test_the_same_job_gives_the_same_rows_whatever_the_window(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"id": i, "prompt": f"p{i}", "n": 2} for i in range(30)])
    texts = []
    for window in (1, 1000):
        run_job(source, tmp_path / f"out{window}.jsonl", FakeBackend(0.002), window=window, sort=True)
        rows = read_rows(tmp_path / f"out{window}.jsonl")
        texts.append([(row["custom_id"], [choice["text"] for choice in row["response"]["body"]["choices"]]) for row in rows])
    assert texts[0] == texts[1]


def test_another_job_seed_gives_other_samples_and_a_rows_own_seed_stays(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p", "seed": 5})
    texts = []
    for seed in (0, 1):
        run_job(source, tmp_path / f"{seed}.jsonl", seed=seed, sort=True)
        texts.append([row["response"]["body"]["choices"][0]["text"] for row in read_rows(tmp_path / f"{seed}.jsonl")])
    assert texts[0][0] != texts[1][0] and texts[0][1] == texts[1][1]


def test_samples_in_flight_stay_within_the_window(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"prompt": f"p{i}", "n": 4} for i in range(40)])
    backend = FakeBackend(0.001)
    run_job(source, tmp_path / "out.jsonl", backend, window=8)
    assert backend.most_in_flight == 8 and backend.closed


def test_a_row_larger_than_the_window_still_runs(tmp_path: Path) -> None:
    summary = run_job(write_lines(tmp_path / "in.jsonl", {"prompt": "p", "n": 64}), tmp_path / "out.jsonl", window=8)
    assert summary.rows["succeeded"] == 1


def test_results_are_written_in_completion_order_and_sorted_on_request(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[f"p{i}" for i in range(20)])
    run_job(source, tmp_path / "out.jsonl", FakeBackend(0.05))
    lines = [row["provenance"]["line"] for row in read_rows(tmp_path / "out.jsonl")]
    assert lines != sorted(lines) and len(set(lines)) == 20
    before = sorted((tmp_path / "out.jsonl").read_bytes().splitlines())
    summary = run_job(source, tmp_path / "out.jsonl", sort=True)
    assert summary.rows["cached"] == 20
    after = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["provenance"]["line"] for line in after] == list(range(1, 21)) and sorted(after) == before


def test_an_error_that_may_pass_is_retried_and_counted(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "flaky")
    backend = FakeBackend()
    summary = run_job(source, tmp_path / "out.jsonl", backend, retries=1)
    assert summary.rows["succeeded"] == 1 and summary.retries == 1
    assert read_rows(tmp_path / "out.jsonl")[0]["provenance"]["attempts"] == 2
    assert run_job(source, tmp_path / "out2.jsonl", retries=0).errors == {"busy": 1}


def test_a_row_that_never_ends_is_an_error_row(tmp_path: Path) -> None:
    summary = run_job(write_lines(tmp_path / "in.jsonl", "hang", "ok"), tmp_path / "out.jsonl", row_timeout_s=0.05, retries=0)
    assert summary.errors == {"row_timeout": 1} and summary.rows["succeeded"] == 1


def test_a_lost_backend_stops_the_job_and_loses_no_row(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b", "lost", "c")
    summary = run_job(source, tmp_path / "out.jsonl", window=1)
    assert (summary.status, summary.exit_code) == ("backend_lost", 4)
    assert summary.rows["remaining"] == 2 and "the fake is gone" in (summary.message or "")
    assert [row["error"] for row in read_rows(tmp_path / "out.jsonl")] == [None, None]


def test_too_many_failures_stop_the_job_and_keep_what_is_done(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[f"fail {i}" if i % 2 else f"ok {i}" for i in range(1000)])
    stopped = run_job(source, tmp_path / "out.jsonl", max_error_rate=0.4, window=64)
    assert (stopped.status, stopped.exit_code) == ("too_many_failures", 3)
    assert 0 < stopped.rows["remaining"] < 900
    finished = run_job(source, tmp_path / "out.jsonl", max_error_rate=1.0)
    assert finished.rows["failed"] == 500 and finished.rows["remaining"] == 0


def test_equal_rows_are_generated_once_with_dedupe(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "p"},
        {"id": "b", "prompt": "q"},
        {"id": "c", "prompt": "p", "metadata": 7},
        {"id": "d", "prompt": "p", "n": 2},
    )
    backend = FakeBackend()
    summary = run_job(source, tmp_path / "out.jsonl", backend, dedupe="exact")
    rows = {row["custom_id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert sorted(backend.calls) == ["p", "p", "q"] and summary.rows["reused"] == 1 and summary.duplicates == 1
    assert rows["c"]["response"]["body"]["choices"] == rows["a"]["response"]["body"]["choices"]
    assert rows["c"]["provenance"]["reused_from"] == "a" and rows["c"]["metadata"] == 7
    assert summary.tokens["completion"] == 40 and summary.tokens["completion_this_run"] == 32


def test_equal_rows_are_reported_and_generated_again_without_dedupe(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"})
    notes = io.StringIO()
    config = JobConfig(input_path=source, output_path=tmp_path / "out.jsonl")
    summary = asyncio.run(Job(config, FakeBackend(), PlainReporter(notes)).run())
    texts = [row["response"]["body"]["choices"][0]["text"] for row in read_rows(tmp_path / "out.jsonl")]
    assert summary.duplicates == 1 and texts[0] != texts[1] and "lines 2 = 1" in notes.getvalue()


def test_interrupting_keeps_finished_rows_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b", "hang", "c")
    config = JobConfig(input_path=source, output_path=tmp_path / "out.jsonl")

    async def interrupted() -> tuple[str, int, int]:
        job = Job(config, FakeBackend(), PlainReporter(io.StringIO()))
        asyncio.get_running_loop().call_later(0.3, job.interrupt)
        summary = await job.run()
        return summary.status, summary.exit_code, summary.rows["succeeded"]

    assert asyncio.run(interrupted()) == ("interrupted", 130, 3)
    assert not (tmp_path / "out.lock").exists()


def test_interrupting_while_the_backend_starts_does_not_wait_for_it(tmp_path: Path) -> None:
    class Slow(FakeBackend):
        async def start(self) -> ModelFacts:
            await asyncio.sleep(3600)
            return self.facts

    async def interrupted() -> None:
        config = JobConfig(input_path=write_lines(tmp_path / "in.jsonl", "a"), output_path=tmp_path / "out.jsonl")
        job = Job(config, backend, PlainReporter(io.StringIO()))
        asyncio.get_running_loop().call_later(0.05, job.interrupt)
        await job.run()

    backend = Slow()
    with pytest.raises(JobInterrupted, match="before the first row"):
        asyncio.run(interrupted())
    assert backend.closed and sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize("now", [["a", "c"], ["a", "b", "c", "d"], ["a"]])
def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b")
    original = runner_module.write_manifest

    def write_then_edit(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        write_lines(source, *now)

    monkeypatch.setattr(runner_module, "write_manifest", write_then_edit)
    with pytest.raises(JobRefused, match="changed while the job ran"):
        run_job(source, tmp_path / "out.jsonl")


def test_bad_default_sampling_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match="temprature"):
        run_job(write_lines(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl", sampling={"temprature": 1})
    assert not (tmp_path / "out.jsonl").exists()


def test_plain_progress_shows_rows_rate_and_time_left(tmp_path: Path) -> None:
    shown = io.StringIO()
    config = JobConfig(input_path=write_lines(tmp_path / "in.jsonl", "a", "fail"), output_path=tmp_path / "out.jsonl")
    asyncio.run(Job(config, FakeBackend(), PlainReporter(shown, interval_s=0)).run())
    last = shown.getvalue().splitlines()[-1]
    assert last.startswith("2/2 rows  failed 1  cached 0") and "tok/s" in last and last.endswith("ETA 0 s")


def test_a_terminal_gets_a_bar_that_ends_full(tmp_path: Path) -> None:
    shown = io.StringIO()
    reporter = BarReporter(Console(file=shown, force_terminal=True, width=200))
    config = JobConfig(input_path=write_lines(tmp_path / "in.jsonl", "a", "fail", "b"), output_path=tmp_path / "out.jsonl")
    summary = asyncio.run(Job(config, FakeBackend(), reporter).run())
    assert summary.rows["total"] == 3 and "3/3" in shown.getvalue() and "failed 1" in shown.getvalue()
