"""The demo: its loss and bookkeeping on small numbers, and the whole loop shortened, with real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch

from batchgen.errors import ErrorInfo
from batchgen.outputs import Group, Sample
from rollout.demo import tracking
from rollout.demo.cli import QUICK, run_demo, run_trainer
from rollout.demo.config import BUNDLED_MODEL, DemoConfig
from rollout.demo.grpo import GrpoTrainer, Rollout, advantages, clipped_objective, micro_batches, response_logprobs, rollouts_of
from rollout.demo.heldout import held_out_items, rewards_of, training_items
from rollout.demo.policy import Policy
from rollout.demo.report import DemoReport

CONFIG = DemoConfig(num_threads=1, **QUICK)


def sample(index: int, **fields) -> Sample:
    values = {"token_ids": [7, 2], "logprobs": [-1.0, -0.5], "text": "#### 5", "finish_reason": "stop", "seed": 0, "weights_versions": []}
    return Sample(index=index, **(values | fields))


def group_of(*samples: Sample) -> Group:
    return Group(request_id="r", prompt_token_ids=[1, 3], samples=list(samples), logprobs_mode="processed")


def test_advantages_have_mean_zero_and_deviation_one_and_equal_rewards_teach_nothing() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])
    assert advantages([1.0, 1.0]) == [0.0, 0.0]
    samples = [sample(0), sample(1), sample(2, token_ids=[], logprobs=[])]
    assert rollouts_of(group_of(*samples), [1.0, 1.0, 1.0]) == []
    assert [one.advantage > 0 for one in rollouts_of(group_of(*samples), [1.0, 0.0, 0.0])] == [True, False]


def test_clipping_stops_a_good_sample_above_and_a_bad_one_below_but_never_the_way_back() -> None:
    ratio_M = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    new_M = ratio_M.log().requires_grad_()
    advantage_M = torch.tensor([1.0, 2.0, -2.0, 2.0, -2.0])
    objective_M, clipped_M = clipped_objective(new_M, torch.zeros(5), advantage_M, 0.2, 0.28)
    torch.testing.assert_close(objective_M, torch.tensor([1.0, 2.56, -3.0, 1.0, -1.6]))
    objective_M.sum().backward()
    assert clipped_M.tolist() == [False, True, False, False, True] == (new_M.grad == 0).tolist()


def test_micro_batches_hold_every_rollout_once_within_the_bound() -> None:
    rollouts = [Rollout(prompt_ids=[1] * 5, response_ids=[2] * n, logprobs=[0.0] * n, advantage=1.0) for n in (3, 90, 1, 7, 7, 2, 30)]
    batches = list(micro_batches(rollouts, 40))
    assert sorted(len(one.response_ids) for batch in batches for one in batch) == [1, 2, 3, 7, 7, 30, 90]
    assert all(len(batch) == 1 or len(batch) * max(5 + len(one.response_ids) for one in batch) <= 40 for batch in batches)


def test_a_step_makes_good_samples_likelier_and_does_not_depend_on_micro_batches() -> None:
    responses = ([4, 9, 2], [5, 2])
    found = []
    for micro_batch_tokens in (1, 1000):
        policy = Policy.from_folder(BUNDLED_MODEL)
        rollouts = [Rollout(prompt_ids=[1, 3, 8], response_ids=ids, logprobs=[-3.0] * len(ids), advantage=1.0) for ids in responses]
        before = response_logprobs(policy, rollouts)
        old = [before[:3].tolist(), before[3:].tolist()]
        rollouts = [replace(rollouts[0], logprobs=old[0]), replace(rollouts[1], logprobs=old[1], advantage=-1.0)]
        report = GrpoTrainer(policy, replace(CONFIG, micro_batch_tokens=micro_batch_tokens)).step(rollouts)
        assert report.num_tokens == 5 and report.logprob_gap < 1e-5
        after = response_logprobs(policy, rollouts)
        assert after[:3].sum() > before[:3].sum() and after[3:].sum() < before[3:].sum()
        found.append(report.grad_norm)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_no_held_out_question_is_ever_trained_on() -> None:
    config = DemoConfig()
    held_out = {item.question for item in held_out_items(config)}
    trained = [item.question for item in islice(training_items(config), 2000)]
    assert len(held_out) == config.held_out and len(set(trained)) == 2000
    assert not held_out.intersection(trained)
    assert trained[:50] != [item.question for item in islice(training_items(replace(config, seed=1)), 50)]


def test_a_failed_sample_is_an_error_not_a_reward_of_zero() -> None:
    item = held_out_items(CONFIG)[0]
    failed = sample(1, finish_reason="error", error=ErrorInfo(code="internal", message="the node broke"))
    with pytest.raises(RuntimeError, match="sample 1: the node broke"):
        rewards_of(item, group_of(sample(0), failed))


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 0), ("samples", 1), ("mini_batches", 99), ("seed", -1), ("learning_rate", 0.0), ("kinds", ("chess",)), ("wandb", "yes")],
)
def test_values_out_of_range_are_refused_with_the_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field} (is|are) .*got .*\w"):
        replace(CONFIG, **{field: value})


def test_a_saved_config_is_the_same_again_and_unknown_names_are_refused(tmp_path: Path) -> None:
    CONFIG.save(tmp_path / "config.json")
    assert DemoConfig.load(tmp_path / "config.json") == CONFIG
    (tmp_path / "other.json").write_text(json.dumps({"kinds": ["lcm"], "rouns": 3}))
    with pytest.raises(TypeError, match="rouns"):
        DemoConfig.load(tmp_path / "other.json")


def test_nothing_fails_without_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = tracking.Tracker("offline", {"seed": 0}, tmp_path)
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    assert "goes on without wandb" in capsys.readouterr().err


def test_wandb_gets_every_round_and_its_failure_ends_the_logging_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeRun:
        def __init__(self) -> None:
            self.rows: list[tuple[int, dict]] = []

        def log(self, values: dict, step: int) -> None:
            if step == 3:
                raise OSError("disk full")
            self.rows.append((step, values))

    run = FakeRun()
    fake = type("wandb", (), {"init": staticmethod(lambda **options: run if options["mode"] == "offline" else None)})
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = tracking.Tracker("offline", {"seed": 0}, tmp_path)
    for step in (1, 2, 3, 4):
        tracker.log(step, {"reward": 0.5})
    tracker.close()
    assert [step for step, _ in run.rows] == [1, 2] and "disk full" in capsys.readouterr().err


def test_the_command_and_the_questions_need_no_torch() -> None:
    program = "import rollout.demo.cli, rollout.demo.heldout, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.e2e
def test_the_shortened_demo_trains_pushes_and_leaves_report_and_plot(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = run_demo(CONFIG, 2, tmp_path)
    assert [one.seed for one in report.seeds] == [0, 1]
    versions = [row.weights_version for one in report.seeds for row in one.rounds]
    assert versions == [2, 3, 5, 6], "each seed pushes the first weights again, then one version a round"
    for one in report.seeds:
        assert all(0 <= row.reward <= 1 and row.sync_ms > 0 and row.logprob_gap < 0.05 for row in one.rounds)
        assert set(one.before.by_kind) == set(CONFIG.kinds)
    assert report.seeds[0].before.greedy == report.seeds[1].before.greedy, "the second seed starts from the bundled weights"
    assert json.loads((tmp_path / "report.json").read_bytes())["seeds"][1]["rounds"][1]["weights_version"] == 6
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    lines = capfd.readouterr().out.splitlines()
    progress = [line for line in lines if line.startswith("round")]
    assert len(progress) == 4 and all("tok/s" in line and "sync" in line and "weights v" in line for line in progress)
    assert isinstance(report, DemoReport) and report.summary()["rounds"] == [2, 2] and "→" in report.table()
    assert "stopped" in (tmp_path / "service.log").read_text()


@pytest.mark.e2e
def test_a_trainer_that_cannot_go_on_ends_the_demo_with_its_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="the trainer ended with code 1"):
        run_trainer("http://127.0.0.1:80", CONFIG, tmp_path / "seed-0")
    assert "demo trainer:" in capfd.readouterr().err


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "rollout.cli", "demo", "--threads", "1", "--out", str(tmp_path)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    family: list[psutil.Process] = []
    while len(family) < 3:  # service, node, trainer
        assert demo.poll() is None
        time.sleep(0.1)
        family = psutil.Process(demo.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(demo.pid, number)  # as a terminal does
    else:
        demo.send_signal(number)
    demo.communicate(timeout=60)
    assert demo.returncode == 128 + number
    assert psutil.wait_procs(family, timeout=20)[1] == []
