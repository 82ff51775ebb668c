"""The command line: serve with its node processes, exit codes, keys, check; and a client that knows only the protocol page."""

import ast
import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollout_kit import in_loop, running, until
from typer.testing import CliRunner

from batchgen.config import EngineConfig
from batchgen.sampling_params import SamplingParams
from rollout import cli, launch
from rollout.client import AsyncRolloutClient
from rollout.launch import ServeConfig, node_command, serve
from rollout.node_main import engine_arguments, parse_engine
from rollout.security import ROLES, ClientKeys, make_keys
from rollout.service import ServiceConfig

HERE = Path(__file__).parent
LOCAL = ServiceConfig(url="tcp://127.0.0.1:0", admin_url="tcp://127.0.0.1:0")
run_cli = CliRunner().invoke


def fake(*options: str) -> list[str]:
    return [sys.executable, str(HERE / "fake_node.py"), "--watch-stdin", *options]


class Serving:
    """`serve` in this loop, with what it said."""

    def __init__(self, *commands: list[str], drain_s: float = 1.0):
        self.said: list[str] = []
        self.task = asyncio.create_task(serve(ServeConfig(service=LOCAL, node_commands=commands, drain_s=drain_s), self.said.append))

    async def url(self) -> str:
        await until(lambda: self.said or self.task.done())
        return self.said[0].split()[2]


@asynccontextmanager
async def serving(*commands: list[str], drain_s: float = 1.0) -> AsyncIterator[tuple[Serving, AsyncRolloutClient]]:
    one = Serving(*commands, drain_s=drain_s)
    async with AsyncRolloutClient(await one.url()) as client:
        try:
            yield one, client
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            assert await one.task == 0
    assert one.said[-1] == "stopped"


@in_loop
async def test_serve_starts_nodes_says_what_is_open_and_stops_in_order():
    async with serving(fake("--name", "a"), fake("--name", "b")) as (one, client):
        assert all("this machine only" in line and "no keys" in line for line in one.said[:2])
        await client.wait_ready(10)
        await until(lambda: any(line.startswith("ready") for line in one.said))
        groups = await client.generate([[k] for k in range(30)], SamplingParams(max_tokens=3))
        assert all(group.samples[0].finish_reason == "length" for group in groups)
    assert sum("ended with code 0" in line for line in one.said) <= 2


@pytest.mark.fault
@in_loop
async def test_a_node_that_dies_is_reported_and_the_service_goes_on():
    async with serving(fake("--name", "steady"), fake("--name", "weak", "--crash-after", "3", "--step-s", "0.01")) as (one, client):
        await client.wait_ready(10)
        while len((await client.health()).nodes) < 2:  # noqa: ASYNC110 - the answer comes over the wire
            await asyncio.sleep(0.02)
        groups = await client.generate([[k] for k in range(40)], SamplingParams(max_tokens=10))
        assert all(group.samples[0].finish_reason == "length" for group in groups)
        await until(lambda: any("ended with code 9" in line for line in one.said))
        health = await client.health()
        assert health.status == "ok" and "weak" in health.lost_nodes[0]


@pytest.mark.fault
@in_loop
async def test_serve_ends_with_the_nodes_code_when_no_node_could_start():
    one = Serving([sys.executable, "-c", "raise SystemExit(2)"])
    assert await one.task == 2
    assert "every node ended before one could serve" in one.said


@pytest.mark.fault
@in_loop
async def test_a_node_ends_when_its_launcher_is_killed():
    script = "\n".join(
        [
            "import asyncio, sys",
            "from rollout.launch import ServeConfig, run",
            "from rollout.service import ServiceConfig",
            "service = ServiceConfig(url='tcp://127.0.0.1:0', admin_url='tcp://127.0.0.1:0')",
            "run(ServeConfig(service=service, node_commands=[sys.argv[1:]]), lambda line: print(line, flush=True))",
        ]
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, *fake("--name", "orphan"), stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    while not (await child.stdout.readline()).startswith(b"ready"):
        pass
    (node,) = _children(child.pid)
    child.kill()
    await child.wait()
    await until(lambda: not _alive(node), "the node ended")


@pytest.mark.fault
@in_loop
async def test_a_node_stopped_while_its_model_loads_ends_at_once():
    script = "\n".join(
        [
            "import sys, time",
            "from rollout.node import NodeConfig",
            "from rollout.node_main import run",
            "print('loading', flush=True)",
            "sys.exit(run(NodeConfig(url='tcp://127.0.0.1:9'), lambda: time.sleep(600)))",
        ]
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    await child.stdout.readline()
    await asyncio.sleep(0.3)
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        assert await child.wait() == 0


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_taken_port_is_a_clear_error_with_its_own_exit_code(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServeConfig(service=ServiceConfig(url=f"tcp://127.0.0.1:{port}", admin_url="tcp://127.0.0.1:0"))
        assert launch.run(config) == launch.EXIT_ADDRESS_IN_USE
    assert "already taken" in capsys.readouterr().err


def test_serve_refuses_addresses_of_others_and_folders_that_are_no_models(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    open_bind = run_cli(cli.app, ["serve", "--model", str(tmp_path), "--host", "0.0.0.0"])
    assert open_bind.exit_code == 3 and "rollout keys" in open_bind.output
    for command in (["serve"], ["node", "--join", "tcp://127.0.0.1:1"]):
        missing = run_cli(cli.app, [*command, "--model", str(tmp_path / "none")])
        assert missing.exit_code == 2 and "config.json" in missing.output
    bad = run_cli(cli.app, ["serve", "--model", str(tmp_path), "--dtype", "int3"])
    assert bad.exit_code == 3 and "int3" in bad.output


def test_keys_makes_files_that_serve_and_clients_can_load(tmp_path):
    for role in ROLES:
        result = run_cli(cli.app, ["keys", str(tmp_path / "keys"), "--name", f"{role}-key", "--role", role])
        assert result.exit_code == 0 and f"{role}-key.json" in result.output
    assert run_cli(cli.app, ["keys", str(tmp_path / "keys"), "--name", "x", "--role", "root"]).exit_code == 3
    assert run_cli(cli.app, ["keys", str(tmp_path / "keys"), "--name", "node-key", "--role", "node"]).exit_code == 3


def test_the_secret_of_a_key_never_reaches_a_command_line(tmp_path):
    path = make_keys(tmp_path / "keys", "worker", ["node"])
    command = node_command(EngineConfig(model="m"), "node-0", path)
    secret = ClientKeys.load(path).secret.decode()
    assert str(path) in command and not any(secret in part for part in command)


def test_a_node_process_gets_exactly_the_engine_that_serve_was_asked_for():
    config = EngineConfig(model="m", dtype="bfloat16", kv_gb=0.5, seed=7, deterministic=True, max_model_len=64, num_threads=1)
    given = dict(argument.removeprefix("--").split("=", 1) for argument in engine_arguments(config))
    assert parse_engine(given) == config


@in_loop
async def test_check_tells_a_running_services_facts_and_names_what_is_wrong_with_an_address():
    async with running() as (one, _):
        result = await asyncio.to_thread(run_cli, cli.app, ["check", one.url])
        assert result.exit_code == 0 and "fake" in result.output and "node-0" in result.output
    result = await asyncio.to_thread(run_cli, cli.app, ["check", "tcp://127.0.0.1:9", "--timeout-s", "0.2"])
    assert result.exit_code == 3 and "no rollout service answered" in result.output


def test_the_command_starts_without_torch():
    code = "import sys, rollout.cli; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@in_loop
async def test_a_client_that_knows_only_the_protocol_page_is_served():
    script = HERE.parent / "examples" / "foreign_client.py"
    imported = {
        name.partition(".")[0]
        for part in ast.walk(ast.parse(script.read_text()))
        for name in (
            [alias.name for alias in part.names]
            if isinstance(part, ast.Import)
            else [part.module or ""]
            if isinstance(part, ast.ImportFrom)
            else []
        )
    }
    assert not imported & {"batchgen", "rollout", "weights_sync"}
    async with running() as (one, _):
        child = await asyncio.create_subprocess_exec(sys.executable, str(script), one.url, "hello", "x", stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
    lines = out.decode().splitlines()
    assert child.returncode == 0 and len(lines) == 4 and all("length" in line and "24 tokens" in line for line in lines)


def test_the_version_is_the_installed_packages():
    from importlib.metadata import version

    import batchgen

    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0 and done.output == f"batchgen {version('batchgen')}\n"
    assert batchgen.__version__ == version("batchgen")
