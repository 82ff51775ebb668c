"""A job survives kill -9, torn files and full disks with no row lost and none twice, and refuses to mix two configurations."""

import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from job_fakes import FACTS, FakeBackend, read_rows, run_job, write_lines

from rollout.jobs import JobRefused
from rollout.jobs.journal import Journal

CHILD = [sys.executable, str(Path(__file__).with_name("job_fakes.py"))]


def wait_for_rows(path: Path, number: int, child: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.002)
    assert child.poll() is None, child.communicate()


@pytest.mark.fault
def test_resume_after_sigkill_writes_each_row_once(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"id": f"r{i}", "prompt": f"p{i}"} for i in range(200)], b"{bad")
    output = tmp_path / "out.jsonl"
    dice = random.Random(3)
    killed = 0
    for _ in range(3):
        child = subprocess.Popen(
            [*CHILD, str(source), str(output), '{"window": 8}', "0.01"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        have = output.read_bytes().count(b"\n") if output.exists() else 0
        wait_for_rows(output, have + dice.randrange(1, 50), child)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        killed += child.returncode == -signal.SIGKILL
    done_before = output.read_bytes().count(b"\n")
    summary = run_job(source, output, window=8)
    rows = read_rows(output)
    assert killed == 3 and summary.rows["cached"] == done_before
    assert sorted(row["provenance"]["line"] for row in rows) == list(range(1, 202))
    assert {row["custom_id"] for row in rows} >= {f"r{i}" for i in range(200)}
    undisturbed = tmp_path / "whole.jsonl"
    run_job(source, undisturbed, window=8)
    results = [{row["custom_id"]: _texts(row) for row in read_rows(path)} for path in (output, undisturbed)]
    assert results[0] == results[1]


def _texts(row: dict) -> list[str] | None:  # type: ignore[type-arg]
    return row["response"] and [choice["text"] for choice in row["response"]["body"]["choices"]]


def test_a_torn_last_line_is_dropped_and_its_row_done_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b", "c")
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    whole = output.read_bytes()
    for cut in (1, 40, len(whole.splitlines()[-1])):
        output.write_bytes(whole[:-cut])
        summary = run_job(source, output)
        assert summary.rows["cached"] == 2 and summary.rows["succeeded"] == 3
        assert sorted(row["provenance"]["line"] for row in read_rows(output)) == [1, 2, 3]
    output.write_bytes(whole + b"\0" * 100)
    assert run_job(source, output).rows["cached"] == 3
    assert output.read_bytes() == whole


def test_wherever_the_file_is_cut_its_whole_lines_survive_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(write_lines(tmp_path / "in.jsonl", "a", "fail", b"{"), tmp_path / "out.jsonl")
    whole = (tmp_path / "out.jsonl").read_bytes()
    monkeypatch.setattr("rollout.jobs.journal.os.fsync", lambda fd: None)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 5), *(end + shift for end in ends for shift in (-1, 0, 1) if end + shift <= len(whole))}):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        journal = Journal(path, 3)
        assert len(list(journal.open())) == journal.num_done == whole[:cut].count(b"\n")
        journal.close()
        assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, cut) + 1] and journal.dropped_bytes == cut - path.stat().st_size


def test_what_a_crash_while_sorting_left_behind_is_replaced(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b")
    run_job(source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl.tmp").write_bytes(before[:50])
    summary = run_job(source, tmp_path / "out.jsonl", sort=True)
    assert summary.rows["cached"] == 2 and sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.manifest.json",
    ]


def test_a_foreign_or_repeated_line_in_the_output_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b")
    output = tmp_path / "out.jsonl"
    run_job(source, output)
    whole = output.read_bytes()
    output.write_bytes(b"{}\n" + whole)
    with pytest.raises(JobRefused, match=r"line 1 .* not a result"):
        run_job(source, output)
    output.write_bytes(whole + whole)
    with pytest.raises(JobRefused, match="second time"):
        run_job(source, output)
    output.write_bytes(whole.replace(b'"line":2', b'"line":9'))
    with pytest.raises(JobRefused, match="does not exist"):
        run_job(source, output)


def test_a_changed_configuration_is_refused_field_by_field(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    output = tmp_path / "out.jsonl"
    run_job(source, output, sampling={"temperature": 1.0, "top_k": 5})
    with pytest.raises(JobRefused) as refused:
        run_job(source, output, sampling={"temperature": 0.5, "min_p": 0.1}, seed=4)
    message = str(refused.value)
    assert "sampling.temperature: was 1.0, now 0.5" in message and "sampling.top_k: was 5, now not given" in message
    assert "sampling.min_p: was not given, now 0.1" in message and "seed: was 0, now 4" in message
    assert "input_digest" not in message
    write_lines(source, "b")
    with pytest.raises(JobRefused, match="input_digest"):
        run_job(source, output, sampling={"temperature": 1.0, "top_k": 5})


def test_another_model_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    run_job(source, tmp_path / "out.jsonl")
    other = type(FACTS)(**{name: getattr(FACTS, name) for name in FACTS.__struct_fields__} | {"fingerprint": "f1"})
    backend = FakeBackend(facts=other)
    with pytest.raises(JobRefused, match='model_fingerprint: was "f0", now "f1"'):
        run_job(source, tmp_path / "out.jsonl", backend)
    assert backend.closed


def test_what_only_changes_speed_may_change_between_runs(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    run_job(source, tmp_path / "out.jsonl")
    assert run_job(source, tmp_path / "out.jsonl", window=3, retries=0, sort=True, max_error_rate=1.0).rows["cached"] == 1


def test_resume_modes_say_what_may_exist(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    output = tmp_path / "out.jsonl"
    with pytest.raises(JobRefused, match="must"):
        run_job(source, output, resume="must")
    assert run_job(source, output, resume="never").rows["cached"] == 0
    assert run_job(source, output, resume="must").rows["cached"] == 1
    with pytest.raises(JobRefused, match="never"):
        run_job(source, output, resume="never")


def test_an_output_that_is_no_jobs_file_is_not_touched(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    output = write_lines(tmp_path / "out.jsonl", {"precious": True})
    with pytest.raises(JobRefused, match="has no manifest"):
        run_job(source, output)
    assert read_rows(output) == [{"precious": True}]


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    run_job(source, tmp_path / "out.jsonl")
    (tmp_path / "out.manifest.json").write_text("{")
    with pytest.raises(JobRefused, match="cannot be read"):
        run_job(source, tmp_path / "out.jsonl")


@pytest.mark.parametrize("name", ["in.jsonl", "link.jsonl", "sub/../in.jsonl"])
def test_the_output_cannot_be_the_input_by_any_name(tmp_path: Path, name: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.jsonl").hardlink_to(source)
    with pytest.raises(JobRefused, match="is the input"):
        run_job(source, tmp_path / name)
    assert read_rows(source) == ["a"]


def test_the_failed_file_of_a_job_cannot_be_its_input(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "out.failed.jsonl", "a")
    with pytest.raises(JobRefused, match="is the input"):
        run_job(source, tmp_path / "out.jsonl")


def test_missing_inputs_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match="does not exist"):
        run_job(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(JobRefused, match="regular file"):
        run_job(tmp_path / "pipe", tmp_path / "out.jsonl")
    with pytest.raises(JobRefused, match="folder"):
        run_job(write_lines(tmp_path / "in.jsonl", "a"), tmp_path / "no" / "out.jsonl")


@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_with_a_summary_and_exit_code_130(tmp_path: Path, number: signal.Signals) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "hang", "fail")
    output = tmp_path / "out.jsonl"
    child = subprocess.Popen([*CHILD, str(source), str(output)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    wait_for_rows(output, 2, child)
    child.send_signal(number)
    said, _ = child.communicate(timeout=60)
    assert child.returncode == 130 and json.loads(said)["status"] == "interrupted"
    assert [row["error"] and row["error"]["code"] for row in read_rows(output)] == [None, "scripted"]
    assert (tmp_path / "out.failed.jsonl").exists() and not (tmp_path / "out.lock").exists()


@pytest.mark.fault
def test_a_second_job_on_the_same_output_is_refused_naming_the_first(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "hang")
    output = tmp_path / "out.jsonl"
    child = subprocess.Popen([*CHILD, str(source), str(output)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        wait_for_rows(output, 1, child)
        with pytest.raises(JobRefused, match=f"process {child.pid} is writing"):
            run_job(source, output)
    finally:
        child.kill()
        child.communicate()
    assert run_job(source, output, row_timeout_s=0.05, retries=0).rows["cached"] == 1


def test_a_lock_file_left_by_a_dead_process_does_not_block(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    (tmp_path / "out.lock").write_text("1\n")
    assert run_job(source, tmp_path / "out.jsonl").status == "completed"
    assert not (tmp_path / "out.lock").exists()


def test_a_lock_held_by_anyone_blocks(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a")
    with (tmp_path / "out.lock").open("w") as held:
        held.write("4242\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobRefused, match="process 4242"):
            run_job(source, tmp_path / "out.jsonl")


@pytest.mark.fault
def test_a_full_disk_stops_cleanly_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[f"p{i}" for i in range(100)])
    output = tmp_path / "out.jsonl"

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    child = subprocess.run(
        [*CHILD, str(source), str(output)],
        preexec_fn=small_files,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    said = json.loads(child.stdout)
    assert child.returncode == 5 and said["status"] == "write_failed" and "File too large" in said["message"]
    assert output.read_bytes().endswith(b"\n") and 0 < said["rows"]["succeeded"] < 100
    summary = run_job(source, output)
    assert summary.rows["cached"] == said["rows"]["succeeded"] and summary.rows["succeeded"] == 100


def test_a_write_that_fails_half_way_leaves_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[f"p{i}" for i in range(10)])
    output = tmp_path / "out.jsonl"
    real_write, calls = os.write, 0

    def failing_write(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise OSError(28, "No space left on device")
        return real_write(fd, data[:50] if calls == 5 else data)

    monkeypatch.setattr("rollout.jobs.journal.os.write", failing_write)
    summary = run_job(source, output)
    monkeypatch.undo()
    assert summary.status == "write_failed" and summary.rows["succeeded"] == 4
    assert len(read_rows(output)) == 4
    assert run_job(source, output).rows["cached"] == 4


def test_finished_rows_reach_the_disk_within_the_sync_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in.jsonl", "a", "b")
    run_job(source, tmp_path / "out.jsonl")
    rows = list(Journal(tmp_path / "out.jsonl", 2).open())
    now, synced = [0.0], []
    journal = Journal(tmp_path / "copy.jsonl", 2, clock=lambda: now[0])
    list(journal.open())
    monkeypatch.setattr("rollout.jobs.journal.os.fsync", synced.append)
    journal.append([rows[0]])
    assert not synced
    now[0] = 6.0
    journal.append([rows[1]])
    assert len(synced) == 1
    journal.close()
    assert len(synced) == 1


def test_copies_are_still_made_after_a_kill_between_original_and_copy(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"})
    output = tmp_path / "out.jsonl"
    run_job(source, output, dedupe="exact")
    output.write_bytes(output.read_bytes().splitlines(keepends=True)[0])
    backend = FakeBackend()
    summary = run_job(source, output, backend, dedupe="exact")
    assert backend.calls == [] and summary.rows == {"total": 2, "succeeded": 2, "failed": 0, "remaining": 0, "cached": 1, "reused": 1}
