"""Questions and accuracy. In: a client and seeds. Out: training questions, held-out accuracy by kind and decoding. Never imports torch."""

from collections.abc import Iterator, Sequence
from random import Random
from statistics import fmean

import msgspec

from batchgen.outputs import Group
from batchgen.sampling_params import SamplingParams
from rollout.client_sync import RolloutClient
from rollout.demo.config import DemoConfig
from rollout.demo.tasks import TaskItem, make_item, make_items, score_response

HELD_OUT_SEED = 1 << 40
"""Training seeds are smaller, so no training stream equals the held-out one."""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out accuracy, 0..1."""

    sampled: float
    """Mean over all samples at temperature 1."""
    greedy: float
    by_kind: dict[str, tuple[float, float]]
    """Kind → (sampled, greedy)."""
    mean_tokens: float
    """Of the samples at temperature 1."""


def chat(item: TaskItem) -> list[dict[str, str]]:
    """The question as the client takes it."""
    return [{"role": "user", "content": item.question}]


def held_out_items(config: DemoConfig) -> list[TaskItem]:
    return make_items(config.held_out, HELD_OUT_SEED, config.kinds)


def training_items(config: DemoConfig) -> Iterator[TaskItem]:
    """Endless new questions, the kinds in turn, without repeats and without any held-out question."""
    seen = {item.question for item in held_out_items(config)}
    rng = Random(config.seed)
    while True:
        for kind in config.kinds:
            item = make_item(kind, rng)
            while item.question in seen:
                item = make_item(kind, rng)
            seen.add(item.question)
            yield item


def rewards_of(item: TaskItem, group: Group) -> list[float]:
    """1.0 per right answer. RuntimeError when the service could not serve a sample: a reward of 0 would hide it."""
    for sample in group.samples:
        if sample.error is not None:
            raise RuntimeError(f"request {group.request_id}, sample {sample.index}: {sample.error.message}")
    return [score_response(item, sample.text) for sample in group.samples]


def measure(client: RolloutClient, config: DemoConfig, items: Sequence[TaskItem]) -> Accuracy:
    """Accuracy of the weights that are served now. Each question has its own fixed seed, so that equal weights measure equal."""
    kinds: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in config.kinds}
    n, max_tokens = config.held_out_samples, config.max_tokens
    sampled = [SamplingParams(n=n, max_tokens=max_tokens, seed=HELD_OUT_SEED + number) for number in range(len(items))]
    greedy = [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(items)
    groups = client.generate([chat(item) for item in items] * 2, sampled + greedy)
    for item, group, alone in zip(items, groups, groups[len(items) :], strict=False):
        kinds[item.kind][0].extend(rewards_of(item, group))
        kinds[item.kind][1].extend(rewards_of(item, alone))
    lengths = [len(sample.token_ids) for group in groups[: len(items)] for sample in group.samples]
    return Accuracy(
        sampled=fmean(reward for scores, _ in kinds.values() for reward in scores),
        greedy=fmean(reward for _, scores in kinds.values() for reward in scores),
        by_kind={kind: (fmean(scores), fmean(alone)) for kind, (scores, alone) in kinds.items() if scores},
        mean_tokens=fmean(lengths),
    )
