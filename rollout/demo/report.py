"""What a run leaves behind. In: rounds and accuracies. Out: the JSON report, its table, the PNG plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from rollout.demo.heldout import Accuracy


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round of sampling, training and pushing."""

    round: int
    """From 1."""
    reward: float
    """Share of right answers among this round's samples."""
    mean_tokens: float
    tok_per_s: float
    """Generated tokens by the wall-clock of `generate`."""
    generate_s: float
    train_s: float
    sync_ms: float
    """A whole weight push: check, transfer, swap."""
    weights_version: int
    """Served after the push."""
    logprob_gap: float
    """Mean distance of the trainer's logprobs from the engine's, same weights, same tokens."""
    clipped: float
    """Largest share of clipped tokens in this round's optimiser steps."""
    grad_norm: float


class SeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """One seed's run, as its trainer saw it."""

    seed: int
    rounds: list[Round]
    before: Accuracy
    after: Accuracy
    wall_s: float
    trainer_cpu_s: float


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole demo."""

    config: dict[str, object]
    seeds: list[SeedReport]
    wall_s: float
    """From the command's start to the service's end."""
    cpu_s: float
    """Processor seconds of service, node and trainers."""

    @property
    def gains(self) -> list[tuple[float, float]]:
        """Per seed the gain in points, (sampled, greedy)."""
        return [(100 * (one.after.sampled - one.before.sampled), 100 * (one.after.greedy - one.before.greedy)) for one in self.seeds]

    def summary(self) -> dict[str, object]:
        """The numbers that matter, for one JSON line."""
        return {
            "seeds": [one.seed for one in self.seeds],
            "sampled_before": [round(one.before.sampled, 4) for one in self.seeds],
            "sampled_after": [round(one.after.sampled, 4) for one in self.seeds],
            "greedy_before": [round(one.before.greedy, 4) for one in self.seeds],
            "greedy_after": [round(one.after.greedy, 4) for one in self.seeds],
            "gain_points_sampled": [round(sampled, 1) for sampled, _ in self.gains],
            "gain_points_greedy": [round(greedy, 1) for _, greedy in self.gains],
            "rounds": [len(one.rounds) for one in self.seeds],
            "sync_ms_mean": round(fmean(one.sync_ms for seed in self.seeds for one in seed.rounds), 1),
            "wall_s": round(self.wall_s, 1),
            "cpu_s": round(self.cpu_s, 1),
        }

    def table(self) -> str:
        """Accuracy per seed, lines for a terminal."""
        lines = ["seed   sampled pass@1      greedy           seconds"]
        for one, (sampled, greedy) in zip(self.seeds, self.gains, strict=True):
            lines.append(
                f"{one.seed:<5}  {one.before.sampled:.2f} → {one.after.sampled:.2f} {sampled:+5.1f}   "
                f"{one.before.greedy:.2f} → {one.after.greedy:.2f} {greedy:+5.1f}   {one.wall_s:6.0f}"
            )
        return "\n".join(lines)


def write_json(path: Path, report: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read_seed(path: Path) -> SeedReport:
    return msgspec.json.decode(path.read_bytes(), type=SeedReport)


def summary_line(report: DemoReport) -> str:
    return json.dumps(report.summary())


def plot(path: Path, seeds: Sequence[SeedReport]) -> None:
    """Reward by round, and held-out accuracy before and after by kind (mean over seeds)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 4))
    for one in seeds:
        left.plot([row.round for row in one.rounds], [row.reward for row in one.rounds], marker=".", label=f"seed {one.seed}")
    left.set(xlabel="round", ylabel="share of right answers", ylim=(0, 1.02), title="Training reward")
    left.legend(loc="lower right")
    kinds = list(seeds[0].before.by_kind)
    names = ["all", *kinds]
    series = {}
    for label, which, column in (
        ("before, sampled", "before", 0),
        ("before, greedy", "before", 1),
        ("after, sampled", "after", 0),
        ("after, greedy", "after", 1),
    ):
        found: list[Accuracy] = [getattr(one, which) for one in seeds]
        total = fmean((one.sampled, one.greedy)[column] for one in found)
        series[label] = [total, *(fmean(one.by_kind[kind][column] for one in found) for kind in kinds)]
    colours = ("#b9c4d6", "#7f8fa9", "#f2b37a", "#d9772b")
    for number, (label, values) in enumerate(series.items()):
        right.bar([place + 0.2 * (number - 1.5) for place in range(len(names))], values, 0.19, label=label, color=colours[number])
    right.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names], fontsize=8)
    right.set(ylim=(0, 1.16), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1.0], title="Held-out accuracy")
    right.legend(loc="upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
