"""The demo's trainer, a process of its own. In: a service's address, a DemoConfig file. Out: lines, report.json, better weights.

It knows the service only through RolloutClient: `generate` for rollouts, `update_weights` to put its weights in their place.

    python -m rollout.demo.trainer tcp://127.0.0.1:5757 OUT/config.json
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch

from batchgen.errors import BatchGenError
from batchgen.outputs import Group
from batchgen.sampling_params import SamplingParams
from rollout.client_sync import RolloutClient
from rollout.demo.config import DemoConfig
from rollout.demo.grpo import GrpoTrainer, Rollout, StepReport, rollouts_of
from rollout.demo.heldout import Accuracy, chat, held_out_items, measure, rewards_of, training_items
from rollout.demo.policy import Policy
from rollout.demo.report import Round, SeedReport, write_json
from rollout.demo.tasks import TaskItem
from rollout.demo.tracking import Tracker

READY_S = 120.0


class Loop:
    """Sample, score, train, push."""

    def __init__(self, client: RolloutClient, config: DemoConfig):
        self._client = client
        self._config = config
        self._policy = Policy.from_folder(config.model)
        self._grpo = GrpoTrainer(self._policy, config)
        self._questions: Iterator[TaskItem] = training_items(config)
        self._params = SamplingParams(n=config.samples, max_tokens=config.max_tokens, temperature=1.0)

    def push(self) -> float:
        """Serve the policy as the next version; whatever was served before is replaced. Returns milliseconds."""
        report = self._client.update_weights(self._policy.state_dict(), version=self._client.health().weights_version + 1)
        self._version: int = report.version
        return 1000.0 * float(report.total_s)

    def round(self, number: int) -> Round:
        started = time.perf_counter()
        items = list(islice(self._questions, self._config.prompts))
        groups = self._client.generate([chat(item) for item in items], self._params)
        generate_s = time.perf_counter() - started
        rewards = [rewards_of(item, group) for item, group in zip(items, groups, strict=True)]
        self._check_versions(groups)
        rollouts = [rollouts_of(group, scores) for group, scores in zip(groups, rewards, strict=True)]
        started = time.perf_counter()
        steps = self._train(rollouts)
        train_s = time.perf_counter() - started
        lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
        return Round(
            round=number,
            reward=fmean(reward for scores in rewards for reward in scores),
            mean_tokens=fmean(lengths),
            tok_per_s=sum(lengths) / generate_s,
            generate_s=generate_s,
            train_s=train_s,
            sync_ms=self.push(),
            weights_version=self._version,
            logprob_gap=steps[0].logprob_gap if steps else 0.0,
            clipped=max((step.clipped for step in steps), default=0.0),
            grad_norm=max((step.grad_norm for step in steps), default=0.0),
        )

    def _train(self, rollouts: Sequence[Sequence[Rollout]]) -> list[StepReport]:
        """One optimiser step per mini-batch of whole groups; those without any difference in reward are left out."""
        count = self._config.mini_batches
        batches = [[one for group in rollouts[start::count] for one in group] for start in range(count)]
        return [self._grpo.step(batch) for batch in batches if batch]

    def _check_versions(self, groups: Sequence[Group]) -> None:
        """Every token of a round is sampled by the weights that the last push put there."""
        expected = self._version
        for group in groups:
            for sample in group.samples:
                if sample.weights_versions != [(expected, 0, len(sample.token_ids))]:
                    raise RuntimeError(f"expected samples of weights v{expected}, got (version, start, end) = {sample.weights_versions}")


def train(client: RolloutClient, config: DemoConfig, out: Path) -> SeedReport:
    """The whole run against a service that is ready. Writes `report.json` into `out`."""
    started = time.perf_counter()
    torch.set_num_threads(config.num_threads)
    loop = Loop(client, config)
    loop.push()
    tracker = Tracker(config.wandb, asdict(config), out)
    items = held_out_items(config)
    before = measure(client, config, items)
    _say_accuracy("before", before, len(items))
    rounds = []
    for number in range(1, config.rounds + 1):
        rounds.append(loop.round(number))
        _say_round(rounds[-1], config.rounds)
        tracker.log(number, {name: float(getattr(rounds[-1], name)) for name in Round.__struct_fields__})
    after = measure(client, config, items)
    _say_accuracy("after", after, len(items))
    tracker.log(config.rounds + 1, {f"held_out_{name}": getattr(after, name) for name in ("sampled", "greedy")})
    tracker.close()
    report = SeedReport(
        seed=config.seed, rounds=rounds, before=before, after=after,
        wall_s=time.perf_counter() - started, trainer_cpu_s=time.process_time(),
    )  # fmt: skip
    write_json(out / "report.json", report)
    return report


def _say_round(row: Round, rounds: int) -> None:
    print(
        f"round {row.round:>3}/{rounds}  reward {row.reward:.2f}  {row.tok_per_s:>6,.0f} tok/s  sync {row.sync_ms:>4.0f} ms  "
        f"weights v{row.weights_version}  "
        f"({row.mean_tokens:.0f} tokens a sample, generate {row.generate_s:.1f} s, train {row.train_s:.1f} s)",
        flush=True,
    )


def _say_accuracy(when: str, accuracy: Accuracy, num_items: int) -> None:
    print(f"held-out accuracy {when}: sampled {accuracy.sampled:.3f}, greedy {accuracy.greedy:.3f} ({num_items} questions)", flush=True)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m rollout.demo.trainer URL CONFIG.json", file=sys.stderr)
        return 2
    url, path = arguments[0], Path(arguments[1])
    try:
        config = DemoConfig.load(path)
        with RolloutClient(url, seed=config.seed, name="demo trainer") as client:
            client.wait_ready(READY_S)
            train(client, config, path.parent)
    except (BatchGenError, ValueError, RuntimeError) as error:
        print(f"demo trainer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
