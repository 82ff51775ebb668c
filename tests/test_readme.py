"""What the README shows works: its code runs, its tables are complete, its commands and files exist."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batchgen import EngineConfig, Group, Sample, SamplingParams
from rollout.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
BASH = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
URL = "tcp://127.0.0.1:5757"


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """The README's service, on a free port; yields its address."""
    serve = next(line for line in BASH if line.startswith("rollout serve"))
    options = [*serve.split()[1:], "--port", "0", "--admin-port", "0", "--kv-gb", "0.1", "--num-threads", "1"]
    command = [sys.executable, "-m", "rollout.cli", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            told: list[str] = []
            for line in process.stdout:
                told.append(line)
                if line.startswith("ready"):
                    break
            urls = re.findall(r"listening on (\S+)", "".join(told))
            assert urls, told
            yield urls[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.e2e
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_each_python_block_runs(number: int, request: pytest.FixtureRequest) -> None:
    code = PYTHON[number]
    if URL in code:
        code = code.replace(URL, request.getfixturevalue("service"))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.e2e
def test_the_commands_that_run_a_file_do(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    lines = [line for line in BASH if line.startswith(("printf ", "rollout run "))]
    script = "\n".join(line.replace("rollout run", f"{sys.executable} -m rollout.cli run --num-threads 1") for line in lines)
    done = subprocess.run([bash, "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


def test_every_command_and_option_shown_exists() -> None:
    shown = [*BASH, *re.findall(r"`(rollout [a-z]+[^`]*)`", README)]
    commands = [(match.group(1), match.group(0)) for line in shown if (match := re.search(r"\brollout ([a-z]+)\b.*", line))]
    assert {"demo", "serve", "run", "node"} <= {name for name, _ in commands}
    for name, line in commands:
        result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
        assert result.exit_code == 0, result.output
        for option in re.findall(r" (--[a-z-]+)", line):
            assert option in result.output, f"rollout {name} has no {option}"


def test_the_command_table_is_complete() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    assert set(re.findall(r"^\| `rollout (\w+)` \|", README, re.MULTILINE)) == names


def section(title: str) -> str:
    """A section's text."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("title", "defaults"),
    [
        ("Sampling parameters", {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}),
        ("Engine options", {field.name: field.default for field in fields(EngineConfig) if field.name != "model"}),
    ],
)
def test_the_tables_of_options_name_every_field_with_its_default(title: str, defaults: dict[str, object]) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section(title), re.MULTILINE))
    assert rows == {name: repr(default) for name, default in defaults.items()}


def test_the_table_of_results_names_every_attribute() -> None:
    names = re.findall(r"^\| `(\w+)` \|", section("Results"), re.MULTILINE)
    assert names == [*(name for name in Sample.__struct_fields__ if name != "reply"), "message"]
    mentioned = section("Results").partition("\n|")[0]
    assert all(f"`{name}`" in mentioned for name in Group.__struct_fields__ if name not in ("request_id", "logprobs_mode"))


def test_every_file_named_in_the_readme_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    scripts = re.findall(r"`python ((?:benchmarks|examples)/\w+\.py)", README)
    missing = [path for path in [*links, *scripts] if "://" not in path and not (ROOT / path).exists()]
    assert links and not missing


def test_the_readme_promises_nothing_for_later() -> None:
    assert not re.search(r"\b(TODO|TBD|coming soon|placeholder|not yet)\b", README, re.IGNORECASE)
