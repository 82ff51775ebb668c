"""The synthetic-data example keeps right, whole and distinct answers only, each with its provenance."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from job_fakes import FACTS, FakeBackend, read_rows
from typer.testing import CliRunner

from batchgen.outputs import Group
from batchgen.sampling_params import SamplingParams
from rollout.demo.tasks import make_items


@pytest.fixture
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "synthetic_data.py"
    spec = importlib.util.spec_from_file_location("synthetic_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Solver(FakeBackend):
    """Sample 0 and 1 are right and equal, 2 is right in other words, 3 is wrong, 4 is right but cut off."""

    def __init__(self, answers: dict[str, str]):
        super().__init__()
        self.answers = answers

    async def generate(self, prompt: Any, params: SamplingParams) -> Group:
        group = await super().generate(prompt, params)
        answer = self.answers[prompt[0]["content"]]
        texts = [f"#### {answer}", f"####  {answer}", f"so #### {answer}", "#### wrong", f"#### {answer}"]
        for sample, text in zip(group.samples, texts, strict=True):
            sample.text, sample.finish_reason = text, "length" if sample.index == 4 else "stop"
        return group


def test_right_whole_distinct_answers_are_kept_with_provenance(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {item.question: item.answer for item in make_items(16, 0)}
    backend = Solver(answers)
    monkeypatch.setattr(example, "make_backend", lambda *_: backend)
    app = example.typer.Typer()
    app.command()(example.main)
    arguments = [str(tmp_path), "--items", "16", "--samples", "5"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "verified.jsonl")
    assert [row["id"].split("/")[1] for row in rows] == ["0", "2"] * 16
    first = rows[0]
    assert first["model_fingerprint"] == FACTS.fingerprint and first["messages"][1]["content"].endswith(first["answer"])
    assert first["weights_versions"] and first["sampling"]["n"] == 5 and int(first["seed"])
    report = json.loads(result.stdout)
    expected = {"tasks": 16, "samples": 80, "kept": 32, "dropped_duplicate": 16, "dropped_wrong": 16, "dropped_length": 16}
    assert expected.items() <= Counter(report).items()
    calls = len(backend.calls)
    before = (tmp_path / "verified.jsonl").read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len(backend.calls) == calls and (tmp_path / "verified.jsonl").read_bytes() == before
