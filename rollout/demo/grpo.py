"""Group-relative policy optimisation. In: a policy, groups of scored samples. Out: a better policy, and what each step did.

Advantages are a sample's reward against its group's (GRPO, arXiv 2402.03300, section 4.1); the loss is the clipped importance-ratio
objective with one mean over all response tokens and a higher upper bound (DAPO, arXiv 2503.14476, sections 3.1 and 3.3), without a KL term.
Shapes: M response tokens of a micro-batch, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor

from batchgen.outputs import Group
from rollout.demo.config import DemoConfig
from rollout.demo.policy import Packed, Policy

WARM_UP_STEPS = 5
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sample as the trainer needs it."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    """The engine's log-probability of each response id when it was sampled."""
    advantage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one optimiser step saw."""

    num_samples: int
    num_tokens: int
    """Response tokens trained on."""
    grad_norm: float
    clipped: float
    """Share of tokens whose gradient the clipping removed."""
    logprob_gap: float
    """Mean distance of the policy's logprobs before the step from the engine's when it sampled."""


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, shifted to mean 0 and scaled to deviation 1; all zeros when they are equal."""
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / deviation if deviation > 0 else 0.0 for reward in rewards]


def rollouts_of(group: Group, rewards: Sequence[float]) -> list[Rollout]:
    """The samples of a group that teach something: none when all rewards are equal."""
    return [
        Rollout(prompt_ids=group.prompt_token_ids, response_ids=sample.token_ids, logprobs=sample.logprobs, advantage=advantage)
        for sample, advantage in zip(group.samples, advantages(rewards), strict=True)
        if advantage != 0.0 and sample.token_ids
    ]


def micro_batches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    """The rollouts in runs of similar length, each at most `max_tokens` long when padded; a longer one comes alone."""
    batch: list[Rollout] = []
    for rollout in sorted(rollouts, key=lambda one: len(one.prompt_ids) + len(one.response_ids)):
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        if batch and (len(batch) + 1) * length > max_tokens:
            yield batch
            batch = []
        batch.append(rollout)
    if batch:
        yield batch


def clipped_objective(new_M: Tensor, old_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Per token the pessimistic one of ratio · advantage with and without clipping, and whether clipping holds it (bool)."""
    ratio_M = (new_M - old_M).exp()
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    free_M, bound_M = ratio_M * advantage_M, clipped_M * advantage_M
    return torch.minimum(free_M, bound_M), bound_M < free_M


def response_logprobs(policy: Policy, batch: Sequence[Rollout]) -> Tensor:
    """float32 log-probabilities [M] of all response ids of the batch, end to end."""
    predict: list[int] = []
    targets: list[int] = []
    start = 0
    for rollout in batch:
        first = start + len(rollout.prompt_ids) - 1
        predict += range(first, first + len(rollout.response_ids))
        targets += rollout.response_ids
        start += len(rollout.prompt_ids) + len(rollout.response_ids)
    packed = Packed.of([rollout.prompt_ids + rollout.response_ids for rollout in batch])
    logits_MV, _ = policy.forward(packed, torch.tensor(predict))
    return logits_MV.log_softmax(-1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)


class GrpoTrainer:
    """Owns the optimiser. The policy's parameters change in place."""

    def __init__(self, policy: Policy, config: DemoConfig):
        self.policy = policy
        self._config = config
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._num_steps = 0

    def step(self, rollouts: Sequence[Rollout]) -> StepReport:
        """One optimiser step on all of `rollouts`, which must not be empty."""
        config = self._config
        num_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        num_clipped, gap = 0, 0.0
        for batch in micro_batches(rollouts, config.micro_batch_tokens):
            lengths = torch.tensor([len(rollout.response_ids) for rollout in batch])
            advantage_M = torch.tensor([rollout.advantage for rollout in batch]).repeat_interleave(lengths)
            old_M = torch.tensor([logprob for rollout in batch for logprob in rollout.logprobs])
            new_M = response_logprobs(self.policy, batch)
            objective_M, clipped_M = clipped_objective(new_M, old_M, advantage_M, config.clip_low, config.clip_high)
            (-objective_M.sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
            num_clipped += int(clipped_M.sum())
            gap += float((new_M.detach() - old_M).abs().sum())
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRAD_NORM))
        self._num_steps += 1
        for param_group in self._optimizer.param_groups:
            param_group["lr"] = config.learning_rate * min(1.0, self._num_steps / WARM_UP_STEPS)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepReport(
            num_samples=len(rollouts),
            num_tokens=num_tokens,
            grad_norm=grad_norm,
            clipped=num_clipped / num_tokens,
            logprob_gap=gap / num_tokens,
        )
