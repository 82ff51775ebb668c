"""The best-of-N example's estimators equal brute force over all subsets, and its bad inputs are refused."""

import importlib.util
import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest
from typer.testing import CliRunner

REWARDS = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
SCORES = [-1.0, -3.0, -2.0, -0.5, -0.7, -9.0]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "best_of_n.py"
    spec = importlib.util.spec_from_file_location("best_of_n", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def over_subsets(k: int, value: Callable[[tuple[int, ...]], float]) -> float:
    return fmean(value(chosen) for chosen in combinations(range(len(REWARDS)), k))


@pytest.mark.parametrize("k", range(1, 7))
def test_estimates_are_the_means_over_all_subsets(example: ModuleType, k: int) -> None:
    some_right = over_subsets(k, lambda chosen: max(REWARDS[i] for i in chosen))
    assert example.pass_at_k(6, 2, k) == pytest.approx(some_right)
    likeliest = over_subsets(k, lambda chosen: REWARDS[max(chosen, key=lambda i: SCORES[i])])
    assert example.best_at_k(REWARDS, SCORES, k) == pytest.approx(likeliest)


def test_equal_scores_go_to_the_first_index(example: ModuleType) -> None:
    assert example.best_at_k([1.0, 0.0], [0.5, 0.5], 2) == 1.0 and example.best_at_k([0.0, 1.0], [0.5, 0.5], 2) == 0.0


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["7", "8", "8"], 1),
        (["7", "8"], 0),
        ([None, None, "3"], 2),
        ([None, "8", "7", "7", "8"], 1),
        ([None, None], None),
        ([], None),
    ],
)
def test_votes_go_to_the_most_frequent_answer_first_on_ties_and_never_to_none(
    example: ModuleType, answers: list[str | None], winner: int | None
) -> None:
    assert example.majority(answers) == winner


def test_votes_of_k_use_disjoint_runs(example: ModuleType) -> None:
    answers = ["a", "b", "b", None, None, "a", "b"]
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert example.majority_at_k(rewards, answers, 3) == 0.5
    assert example.majority_at_k(rewards, answers, 1) == pytest.approx(2 / 7)


@pytest.mark.parametrize("k", [0, 7, -1])
def test_more_than_was_drawn_is_an_error(example: ModuleType, k: int) -> None:
    for estimate in (
        lambda: example.pass_at_k(6, 2, k),
        lambda: example.best_at_k(REWARDS, SCORES, k),
        lambda: example.majority_at_k(REWARDS, ["1"] * 6, k),
    ):
        with pytest.raises(ValueError, match="draw more samples"):
            estimate()


def test_the_example_plots_the_bundled_model(example: ModuleType, tmp_path: Path) -> None:
    app = example.typer.Typer()
    app.command()(example.main)
    arguments = [str(tmp_path), "--questions", "4", "--samples", "6", "--kind", "chain_sum", "--max-tokens", "40"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.strip().splitlines()[-1])
    assert last["n"] == [1, 2, 4, 6] and all(len(values) == 4 for values in last["accuracy"].values())
    assert (tmp_path / "best_of_n.png").read_bytes().startswith(b"\x89PNG")
