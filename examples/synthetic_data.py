"""Verified solutions for training. In: generated tasks and a model. Out: a folder with tasks, all samples, and the verified ones.

    python examples/synthetic_data.py runs/synthetic --items 400 --samples 8
    python examples/synthetic_data.py runs/synthetic --items 400 --samples 8 --url tcp://127.0.0.1:5757

The samples are made by the machinery of `rollout run`: stop it at any moment, by kill -9 too, and run the same command again.
"""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from batchgen.errors import BatchGenError
from rollout.demo.tasks import SHORT_KINDS, TaskItem, make_items, score_response
from rollout.jobs import JobConfig
from rollout.jobs.cli import make_backend, run
from rollout.jobs.journal import replace_file


def write_tasks(path: Path, items: list[TaskItem]) -> None:
    """One chat request a task; what the verifier needs travels in its metadata."""

    def lines() -> Iterator[bytes]:
        for number, item in enumerate(items):
            row = {"id": f"{item.kind}-{number}", "messages": [{"role": "user", "content": item.question}], "metadata": asdict(item)}
            yield json.dumps(row).encode() + b"\n"

    replace_file(path, lines())


def verified(samples: Path, keep: int, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Right, complete and distinct answers, at most `keep` a task, with where each comes from."""
    with samples.open() as file:
        for line in file:
            row = json.loads(line)
            counts["tasks"] += 1
            if row["response"] is None:
                counts["failed_tasks"] += 1
                continue
            item = TaskItem(**row["metadata"])
            seen: set[str] = set()
            for choice in row["response"]["body"]["choices"]:
                counts["samples"] += 1
                text = choice["message"]["content"]
                if choice["finish_reason"] != "stop":
                    counts[f"dropped_{choice['finish_reason']}"] += 1
                elif score_response(item, text) < 1.0:
                    counts["dropped_wrong"] += 1
                elif (normal := " ".join(text.split())) in seen:
                    counts["dropped_duplicate"] += 1
                elif len(seen) == keep:
                    counts["dropped_surplus"] += 1
                else:
                    seen.add(normal)
                    counts["kept"] += 1
                    yield _training_row(row, item, choice)
            counts["solved_tasks"] += bool(seen)


def _training_row(row: dict[str, Any], item: TaskItem, choice: dict[str, Any]) -> dict[str, Any]:
    provenance = row["provenance"]
    return {
        "id": f"{row['custom_id']}/{choice['index']}",
        "messages": [{"role": "user", "content": item.question}, choice["message"]],
        "kind": item.kind,
        "answer": item.answer,
        "model": row["response"]["body"]["model"],
        "model_fingerprint": provenance["model_fingerprint"],
        "engine_version": provenance["engine_version"],
        "weights_versions": choice["weights_versions"],
        "sampling": provenance["sampling"],
        "seed": choice["seed"],
        "verifier": "rollout.demo.tasks.score_response",
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Where tasks.jsonl, samples.jsonl and verified.jsonl go.")],
    items: Annotated[int, typer.Option(help="Tasks to make.")] = 200,
    samples: Annotated[int, typer.Option(help="Candidates a task.")] = 8,
    keep: Annotated[int, typer.Option(help="Most distinct solutions kept a task.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest candidate; longer ones are cut off and dropped.")] = 128,
    temperature: Annotated[float, typer.Option(help="Of the candidates.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of tasks and samples.")] = 0,
    url: Annotated[str | None, typer.Option(help="A running service; otherwise an engine in this process.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder of the engine; the bundled model by default.")] = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / "tasks.jsonl", make_items(items, seed, SHORT_KINDS))
    config = JobConfig(
        input_path=folder / "tasks.jsonl",
        output_path=folder / "samples.jsonl",
        sampling={"n": samples, "max_tokens": max_tokens, "temperature": temperature},
        seed=seed,
        sort=True,
    )
    try:
        summary = asyncio.run(run(config, make_backend(url, model, {})))
    except (BatchGenError, ValueError) as error:
        sys.exit(f"synthetic_data: {error}")
    if summary.exit_code:
        print(f"synthetic_data: {summary.message or summary.status}", file=sys.stderr)
        sys.exit(summary.exit_code)
    counts: Counter[str] = Counter()
    rows = (json.dumps(row).encode() + b"\n" for row in verified(config.output_path, keep, counts))
    replace_file(folder / "verified.jsonl", rows)
    print(f"{counts['kept']} verified solutions of {counts['solved_tasks']} tasks in {folder / 'verified.jsonl'}", file=sys.stderr)
    print(json.dumps({"output": str(folder / "verified.jsonl"), **counts}))


if __name__ == "__main__":
    typer.run(main)
