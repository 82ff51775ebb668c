"""Accuracy against the number of samples. In: a model, N. Out: a table, best_of_n.png and one JSON line.

    python examples/best_of_n.py runs/best_of_n --questions 60 --samples 64
    python examples/best_of_n.py runs/best_of_n --samples 256 --url tcp://127.0.0.1:5757

Three ways to use N samples of a question: a verifier picks a right one if there is one (pass@N), the model's own likelihood picks, or the
answers vote. All estimates are unbiased over the samples drawn.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from batchgen import LLM, SamplingParams
from batchgen.errors import BatchGenError
from batchgen.outputs import Group
from rollout import RolloutClient
from rollout.demo.config import BUNDLED_MODEL, DEMO_KINDS
from rollout.demo.tasks import TaskItem, extract_answer, make_items, score_response


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that k of n samples drawn without replacement hold one of the `correct` right ones (arXiv 2107.03374, section 2.1)."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n = {n}, correct = {correct}, k = {k}; draw more samples")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def best_at_k(rewards: Sequence[float], scores: Sequence[float], k: int) -> float:
    """Expected reward of the best-scored one of k samples drawn without replacement; equal scores go to the first index."""
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"best-of-k needs 1 <= k <= n, got n = {n}, k = {k}; draw more samples")
    ranked = sorted(range(n), key=lambda index: -scores[index])
    return sum(rewards[index] * comb(n - 1 - rank, k - 1) for rank, index in enumerate(ranked)) / comb(n, k)


def majority(answers: Sequence[str | None]) -> int | None:
    """Index of the first sample with the most frequent answer; ties go to the answer seen first, None never wins."""
    counts = Counter(answer for answer in answers if answer is not None)
    return answers.index(max(counts, key=lambda answer: counts[answer])) if counts else None


def majority_at_k(rewards: Sequence[float], answers: Sequence[str | None], k: int) -> float:
    """Mean reward of the vote over the disjoint runs of k samples; an incomplete last run is left out."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"a vote of k needs 1 <= k <= n, got n = {len(answers)}, k = {k}; draw more samples")
    votes = []
    for start in range(0, len(answers) - k + 1, k):
        winner = majority(answers[start : start + k])
        votes.append(0.0 if winner is None else rewards[start + winner])
    return fmean(votes)


def curves(items: Sequence[TaskItem], groups: Sequence[Group], ks: Sequence[int]) -> dict[str, list[float]]:
    """Name → accuracy at each k, a mean over the questions."""
    rows = []
    for item, group in zip(items, groups, strict=True):
        rewards = [score_response(item, sample.text) for sample in group.samples]
        answers = [extract_answer(sample.text) if sample.finish_reason == "stop" else None for sample in group.samples]
        rows.append((rewards, answers, [sum(sample.logprobs) for sample in group.samples]))
    return {
        "best of N, verifier": [fmean(pass_at_k(len(r), round(sum(r)), k) for r, _, _ in rows) for k in ks],
        "best of N, likelihood": [fmean(best_at_k(r, scores, k) for r, _, scores in rows) for k in ks],
        "majority vote": [fmean(majority_at_k(r, answers, k) for r, answers, _ in rows) for k in ks],
    }


def sample(items: Iterable[TaskItem], params: SamplingParams, url: str | None, model: Path, seed: int) -> list[Group]:
    """All samples, from a running service or an engine in this process."""
    prompts = [[{"role": "user", "content": item.question}] for item in items]
    if url is None:
        return LLM(str(model), seed=seed).generate(prompts, params)
    with RolloutClient(url, seed=seed) as client:
        return client.generate(prompts, params)


def plot(path: Path, ks: Sequence[int], found: dict[str, list[float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, values in found.items():
        axes.plot(ks, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(xlabel="samples N", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main(
    folder: Annotated[Path, typer.Argument(help="Where best_of_n.png goes.")],
    questions: Annotated[int, typer.Option(help="Questions, in equal shares of the kinds.")] = 60,
    samples: Annotated[int, typer.Option(help="Samples a question, at most 1024: the largest N.")] = 64,
    kind: Annotated[list[str] | None, typer.Option(help="Task kinds of rollout.demo.tasks; may be given several times.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest sample.")] = 112,
    temperature: Annotated[float, typer.Option(help="Of the samples.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of questions and samples.")] = 0,
    url: Annotated[str | None, typer.Option(help="A running service; otherwise an engine in this process.")] = None,
    model: Annotated[Path, typer.Option(help="Model folder of the engine.")] = BUNDLED_MODEL,
) -> None:
    try:
        items = make_items(questions, seed, tuple(kind or DEMO_KINDS))
        groups = sample(items, SamplingParams(n=samples, max_tokens=max_tokens, temperature=temperature), url, model, seed)
    except (BatchGenError, ValueError) as error:
        sys.exit(f"best_of_n: {error}")
    failed = [one.error.message for group in groups for one in group.samples if one.error is not None]
    if failed:
        sys.exit(f"best_of_n: {len(failed)} samples failed; the first: {failed[0]}")
    ks = sorted({1 << power for power in range(samples.bit_length())} | {samples})
    found = curves(items, groups, ks)
    folder.mkdir(parents=True, exist_ok=True)
    plot(folder / "best_of_n.png", ks, found)
    print(f"{'N':>5}  " + "  ".join(f"{name:>22}" for name in found), file=sys.stderr)
    for row, k in enumerate(ks):
        print(f"{k:>5}  " + "  ".join(f"{values[row]:>22.3f}" for values in found.values()), file=sys.stderr)
    accuracy = {name: [round(value, 4) for value in values] for name, values in found.items()}
    print(json.dumps({"plot": str(folder / "best_of_n.png"), "questions": questions, "n": ks, "accuracy": accuracy}))


if __name__ == "__main__":
    typer.run(main)
