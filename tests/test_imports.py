"""Who may import whom, what starts without torch, and which names users rely on."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("batchgen", "rollout", "weights_sync")
FORBIDDEN = {
    "batchgen": {"rollout", "weights_sync", "examples", "benchmarks", "tests"},
    "weights_sync": {"rollout", "examples", "benchmarks", "tests"},
}
WEIGHTS_SYNC_MAY_USE = {"batchgen.errors"}
"""weights_sync meets the engine through its own Protocol; only the error tree is shared."""
WITHOUT_TORCH = (
    "batchgen",
    "batchgen.config",
    "batchgen.errors",
    "batchgen.events",
    "batchgen.outputs",
    "batchgen.request",
    "batchgen.sampling_params",
    "batchgen.scheduler",
    "rollout",
    "rollout.cli",
    "rollout.client",
    "rollout.client_sync",
    "rollout.jobs",
    "rollout.jobs.cli",
    "rollout.launch",
    "rollout.limits",
    "rollout.node",
    "rollout.router",
    "rollout.service",
    "rollout.wire",
    "weights_sync",
    "weights_sync.coordinator",
    "weights_sync.manifest",
    "weights_sync.messages",
)
PUBLIC = {
    "batchgen": [
        "LLM",
        "BatchGenError",
        "ChatPrompt",
        "Engine",
        "EngineConfig",
        "ErrorInfo",
        "Group",
        "RequestError",
        "Sample",
        "SamplingParams",
    ],
    "rollout": [
        "AdminError",
        "AsyncRolloutClient",
        "ClosedError",
        "ConnectError",
        "DeadlineError",
        "ProtocolError",
        "RolloutClient",
        "RolloutError",
        "SecurityError",
        "ServiceLostError",
    ],
    "rollout.jobs": [
        "Backend",
        "BackendLost",
        "EmbeddedBackend",
        "Job",
        "JobConfig",
        "JobInterrupted",
        "JobRefused",
        "JobStopped",
        "JobWriteError",
        "PlainReporter",
        "Reporter",
        "ResultRow",
        "ServiceBackend",
        "Summary",
        "TooManyFailures",
        "default_reporter",
    ],
    "weights_sync": ["Coordinator", "PushReport", "WeightPublisher", "WeightReceiver", "ZmqChannel"],
}


def modules(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import; write it out"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_in_one_direction_only(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(package)
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong


def test_weights_sync_knows_the_engine_only_through_its_protocol() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules("weights_sync")
        for line, name in imports(path)
        if name.split(".")[0] == "batchgen" and not any(name == home or name.startswith(f"{home}.") for home in WEIGHTS_SYNC_MAY_USE)
    ]
    assert not wrong


def test_packages_import_neither_examples_nor_tests() -> None:
    for package in PACKAGES:
        for path in modules(package):
            assert not {name.split(".")[0] for _, name in imports(path)} & {"examples", "benchmarks", "tests"}, path


def test_clients_configs_and_the_service_start_without_torch() -> None:
    program = f"""
import importlib, sys
for name in {WITHOUT_TORCH!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name + " imports torch"
    assert "transformers" not in sys.modules, name + " imports transformers"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these_and_each_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert not hasattr(module, "no_such_name")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_opens_with_a_line_that_says_what_it_is(package: str) -> None:
    silent = []
    for path in modules(package):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if not docstring or not docstring.splitlines()[0].strip().endswith((".", ":", "?")):
            silent.append(str(path.relative_to(ROOT)))
    assert not silent


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unpickles_or_evaluates(package: str) -> None:
    """Rule R1 of the wire: no decoder that can run code, anywhere."""
    banned_modules = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    banned_calls = {"eval", "exec", "recv_pyobj", "send_pyobj"}
    wrong = []
    for path in modules(package):
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line, name in imports(path) if name.split(".")[0] in banned_modules]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                function = node.func
                name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
                of_torch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "torch"
                bare = isinstance(function, ast.Name) or name.endswith("pyobj")
                if (name in banned_calls and bare) or (of_torch and name == "load"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {name}")
    assert not wrong
