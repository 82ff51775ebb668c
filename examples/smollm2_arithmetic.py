"""What sampling more buys on a real model. In: a folder of smollm2.py, N. Out: a table of mean and best-of-N accuracy, one JSON line.

    python examples/smollm2_arithmetic.py runs/smollm2/moe
    python examples/smollm2_arithmetic.py runs/smollm2/moe --url tcp://127.0.0.1:5757     # a service that serves that folder

Questions and scores are reasoning-gym's (`pip install reasoning-gym`): sums and products of two one-digit numbers. The model says more
than asked, so the last number of a response is its answer. Best of N is pass@N: a verifier picks a right sample if there is one.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from best_of_n import pass_at_k, sample

from batchgen import SamplingParams
from batchgen.errors import BatchGenError
from batchgen.outputs import Group
from rollout.demo.tasks import TaskItem, is_correct

DIFFICULTY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
KINDS = ("chain_sum", "products")


def questions(kind: str, num_items: int, seed: int) -> list[TaskItem]:
    """reasoning-gym's items of this kind, two one-digit numbers each."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(kind, size=num_items, seed=seed, **DIFFICULTY)
    return [TaskItem(kind, item["question"], item["answer"], item["metadata"]) for item in dataset]


def last_number(response: str) -> str | None:
    """The last number in a text, without the commas of thousands."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
    return numbers[-1].replace(",", "") if numbers else None


def num_right(item: TaskItem, group: Group) -> int:
    answers = [last_number(one.text) for one in group.samples]
    return sum(answer is not None and is_correct(item, answer) for answer in answers)


def accuracy(items: Sequence[TaskItem], groups: Sequence[Group], ks: Sequence[int]) -> dict[int, float]:
    """k → probability that k samples of a question hold a right one, a mean over the questions; k = 1 is the mean accuracy."""
    pairs = [(len(group.samples), num_right(item, group)) for item, group in zip(items, groups, strict=True)]
    return {k: fmean(pass_at_k(n, right, k) for n, right in pairs) for k in ks}


def main(
    model: Annotated[Path, typer.Argument(help="Model folder, dense or moe; only the service reads it when --url is given.")],
    num_items: Annotated[int, typer.Option("--questions", help="Questions of each kind.")] = 50,
    samples: Annotated[int, typer.Option(help="Samples a question, at most 1024: the largest N.")] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest sample.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of questions and samples.")] = 0,
    url: Annotated[str | None, typer.Option(help="A running service; otherwise an engine in this process.")] = None,
) -> None:
    ks = sorted({1 << power for power in range(samples.bit_length())} | {samples})
    items = {kind: questions(kind, num_items, seed) for kind in KINDS}
    try:
        together = [item for kind in KINDS for item in items[kind]]
        groups = sample(together, SamplingParams(n=samples, max_tokens=max_tokens), url, model, seed)
    except (BatchGenError, ValueError) as error:
        sys.exit(f"smollm2_arithmetic: {error}")
    failed = [one.error.message for group in groups for one in group.samples if one.error is not None]
    if failed:
        sys.exit(f"smollm2_arithmetic: {len(failed)} samples failed; the first: {failed[0]}")
    found: dict[str, Any] = {}
    print(f"{'best of':12}" + "".join(f"{k:>8}" for k in ks), file=sys.stderr)
    for number, kind in enumerate(KINDS):
        values = accuracy(items[kind], groups[number * num_items : (number + 1) * num_items], ks)
        print(f"{kind:12}" + "".join(f"{value:>8.3f}" for value in values.values()), file=sys.stderr)
        found[kind] = [round(value, 4) for value in values.values()]
    print(json.dumps({"model": str(model), "questions": num_items, "n": ks, "accuracy": found}))


if __name__ == "__main__":
    typer.run(main)
