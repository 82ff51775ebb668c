"""`rollout demo`. In: command-line options. Out: a service and a trainer process, a live line per round, report.json, demo.png.

Stopping order, whatever happens: the trainer first (its client leaves), then the service, which stops its node.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.demo.config import DemoConfig
from rollout.demo.report import DemoReport, SeedReport, plot, read_seed, summary_line, write_json

START_S = 60.0
"""Longest wait for the service to open its sockets."""
STOP_S = 20.0
"""Longest wait for a process after SIGTERM."""
QUICK = {"rounds": 2, "prompts": 6, "samples": 4, "held_out": 10, "held_out_samples": 2, "max_tokens": 48}


def demo_command(
    rounds: Annotated[
        int | None, typer.Option(help=f"Rounds of sampling, training and pushing weights. Default: {DemoConfig().rounds}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many runs, with consecutive seeds; each starts from the bundled weights.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for report.json, demo.png and the logs.")] = Path("runs/demo"),
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the engine, and of the trainer. Default: the cores, at most 4.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help=f"AdamW's. Default: {DemoConfig().learning_rate:g}.")] = None,
    wandb: Annotated[str, typer.Option(help="off, offline or online; needs `pip install wandb`.")] = "off",
    quick: Annotated[bool, typer.Option("--quick", help="Two tiny rounds: shows that everything works, teaches nothing.")] = False,
) -> None:
    """Watch the bundled model get better at arithmetic by reinforcement learning, through the service. Takes minutes on two cores."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, so that no process is left behind
    num_threads = threads or min(4, len(os.sched_getaffinity(0)))
    chosen = {"rounds": rounds, "learning_rate": learning_rate}
    fields: dict[str, Any] = (QUICK if quick else {}) | {name: value for name, value in chosen.items() if value is not None}
    try:
        if seeds < 1:
            raise ValueError(f"seeds is at least 1, got {seeds}")
        config = DemoConfig(seed=seed, num_threads=num_threads, wandb=wandb, **fields)
        report = run_demo(config, seeds, out)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"rollout demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"\n{report.table()}\n\nplot {out / 'demo.png'}   report {out / 'report.json'}\n{summary_line(report)}")


def run_demo(config: DemoConfig, num_seeds: int, out: Path) -> DemoReport:
    """Run `num_seeds` seeds against one service. RuntimeError when a process fails, with where its log is."""
    started, used = time.perf_counter(), _children_cpu_s()
    out.mkdir(parents=True, exist_ok=True)
    reports: list[SeedReport] = []
    with serving(config, out / "service.log") as url:
        for number in range(num_seeds):
            one = replace(config, seed=config.seed + number)
            print(f"seed {one.seed}: {one.rounds} rounds of {one.prompts} questions x {one.samples} samples, service at {url}", flush=True)
            reports.append(run_trainer(url, one, out / f"seed-{one.seed}"))
    report = DemoReport(config=asdict(config), seeds=reports, wall_s=time.perf_counter() - started, cpu_s=_children_cpu_s() - used)
    write_json(out / "report.json", report)
    plot(out / "demo.png", reports)
    return report


@contextmanager
def serving(config: DemoConfig, log: Path) -> Iterator[str]:
    """`rollout serve` with the model on a free loopback port; gives its address."""
    command = [
        sys.executable, "-m", "rollout.cli", "serve", "--model", config.model, "--port", "0", "--admin-port", "0",
        "--num-threads", str(config.num_threads), "--max-model-len", "512", "--kv-gb", "0.25", "--drain-s", "1",
    ]  # fmt: skip
    with log.open("w") as output:
        service = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment(config))  # noqa: S603 - our own command
    try:
        yield _address(service, log)
    finally:
        _end(service)


def run_trainer(url: str, config: DemoConfig, folder: Path) -> SeedReport:
    """The trainer process, its lines on our terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save(folder / "config.json")
    (folder / "report.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "rollout.demo.trainer", url, str(folder / "config.json")]
    trainer = subprocess.Popen(command, env=_environment(config))  # noqa: S603 - our own command
    try:
        code = trainer.wait()
    finally:
        _end(trainer)
    if code != 0:
        raise RuntimeError(f"the trainer ended with code {code}; see above and {folder.parent / 'service.log'}")
    return read_seed(folder / "report.json")


def _environment(config: DemoConfig) -> dict[str, str]:
    # Engine and trainer take turns on the same cores: a thread that spins while it waits takes them from the other.
    return {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(config.num_threads)}


def _address(service: "subprocess.Popen[bytes]", log: Path) -> str:
    """The public address that the service says it listens on."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("listening on ") and "for clients" in line:
                return line.split()[2]
        if service.poll() is not None:
            raise RuntimeError(f"the service ended with code {service.returncode}; see {log}")
        time.sleep(0.05)
    raise RuntimeError(f"the service did not open its sockets within {START_S:g} s; see {log}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
