"""FakeEngine: the Engine face with scripted tokens, delays and failures. No model, no torch.

Token t of a sample is `(seed + t) % vocab_size`, so every result can be predicted from the request.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchgen.errors import ErrorInfo, RequestError, WeightUpdateError
from batchgen.events import EngineStats, ModelFacts, PromptScored, SampleFinished, SampleProgress, WeightsCommitted
from batchgen.outputs import Sample
from batchgen.request import Request, sample_seed

VOCAB = 1000


def fake_facts(fingerprint: str = "f" * 64) -> ModelFacts:
    return ModelFacts(
        name="fake", architecture="Fake", fingerprint=fingerprint, vocab_size=VOCAB, max_model_len=4096, eos_token_ids=[0], num_layers=2,
        num_experts=4, num_experts_per_tok=2, dtype="float32", deterministic=True,
    )  # fmt: skip


def fake_tokens(seed: int, count: int) -> list[int]:
    return [(seed + t) % VOCAB for t in range(count)]


class FakeTokenizer:
    """One id per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: Any = None, **variables: Any) -> list[int]:
        shown = "".join(f"<{m['role']}>{m['content']}{m.get('tool_calls') or ''}" for m in messages)
        return self.encode(shown + (json.dumps([tools, variables]) if tools or variables else ""))


@dataclass
class Spec:
    shape: tuple[int, ...]
    dtype: str


class FakeStage:
    def __init__(self, store: "FakeWeights", version: int):
        self.store, self.version, self.tensors, self.closed = store, version, dict[str, Any](), False

    def put(self, name: str, tensor: Any) -> None:
        if not bool(tensor.isfinite().all()):
            raise WeightUpdateError(f"{name} is not finite")
        self.tensors[name] = tensor.clone()

    def missing(self) -> list[str]:
        return [name for name in self.store.specs if name not in self.tensors]

    def discard(self) -> None:
        self.closed, self.store.stage = True, None

    def commit(self) -> None:
        self.store.version, self.store.tensors, self.store.stage = self.version, self.tensors, None


class FakeWeights:
    def __init__(self, specs: dict[str, Spec], version: int):
        self.specs, self.version = specs, version
        self.tensors: dict[str, Any] = {}
        self.stage: FakeStage | None = None

    def open(self, version: int) -> FakeStage:
        if self.stage is not None or version <= self.version:
            raise WeightUpdateError(f"version {version} cannot be opened at {self.version}")
        self.stage = FakeStage(self, version)
        return self.stage


@dataclass
class _Running:
    request: Request
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)


class FakeEngine:
    """tokens_per_step tokens for each of at most max_num_seqs samples per step, which takes step_s seconds."""

    def __init__(
        self, *, step_s: float = 0.0, tokens_per_step: int = 16, max_num_seqs: int = 256, version: int = 0, fingerprint: str = "f" * 64,
        on_step: Callable[["FakeEngine"], None] | None = None, specs: dict[str, Spec] | None = None,
    ):  # fmt: skip
        self.facts = fake_facts(fingerprint)
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.weights = FakeWeights(specs or {"w": Spec((4, 8), "float32")}, version)
        self.step_s, self.tokens_per_step, self.max_num_seqs, self.on_step = step_s, tokens_per_step, max_num_seqs, on_step
        self.paused = False
        self.submitted: list[Request] = []
        self._live: list[_Running] = []
        self._aborted: set[tuple[str, int]] = set()
        self._pending: list[Any] = []
        self._commit: tuple[Any, str] | None = None
        self._stats = EngineStats()

    @property
    def weights_version(self) -> int:
        return self.weights.version

    @property
    def has_work(self) -> bool:
        return bool(self._pending) or bool(self._aborted) or self._can_commit or (bool(self._live) and not self.paused)

    @property
    def _can_commit(self) -> bool:
        return self._commit is not None and (self._commit[1] != "finish" or not any(one.tokens for one in self._live))

    def submit(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise RequestError("prompt is empty", code="empty_prompt")
        if any(not 0 <= token < VOCAB for token in request.prompt_token_ids):
            raise RequestError(f"prompt has a token id outside 0..{VOCAB - 1}", code="token_out_of_range")
        self.submitted.append(request)
        if request.params.prompt_logprobs is not None:
            values = [None, *[-float(token) for token in request.prompt_token_ids[1:]]]
            top = [{}, *[{token: -0.5} for token in request.prompt_token_ids[1:]]] if request.params.prompt_logprobs else None
            self._pending.append(PromptScored(request_id=request.request_id, prompt_logprobs=values, prompt_top_logprobs=top))
        for index in request.sample_indices:
            self._live.append(_Running(request, index, sample_seed(request.seed_base, index)))

    def abort(self, request_id: str, sample_indices: Sequence[int] | None = None) -> None:
        for one in self._live:
            if one.request.request_id == request_id and (sample_indices is None or one.index in sample_indices):
                self._aborted.add((request_id, one.index))

    def abort_all(self) -> None:
        self._aborted |= {(one.request.request_id, one.index) for one in self._live}

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def commit_weights(self, stage: FakeStage, policy: str = "finish") -> None:
        if stage.missing():
            raise WeightUpdateError(f"missing {stage.missing()}")
        self._commit = (stage, policy)

    def stats(self) -> EngineStats:
        self._stats.weights_version = self.weights_version
        self._stats.running = len(self._live)
        return self._stats

    def step(self) -> list[Any]:
        if self.step_s:
            time.sleep(self.step_s)
        if self.on_step is not None:
            self.on_step(self)
        self._stats.steps += 1
        events, self._pending = self._pending, []
        for one in [one for one in self._live if (one.request.request_id, one.index) in self._aborted]:
            events.append(self._finish(one, "abort"))
        self._aborted.clear()
        if self._can_commit and self._commit is not None:
            stage, policy = self._commit
            if policy == "abort":
                events += [self._finish(one, "abort") for one in list(self._live)]
            stage.commit()
            self._commit = None
            events.append(WeightsCommitted(version=self.weights_version, paused_s=0.0))
        if self.paused:
            return events
        runnable = [one for one in self._live if self._commit is None or self._commit[1] != "finish" or one.tokens]
        for one in runnable[: self.max_num_seqs]:
            start = len(one.tokens)
            count = min(self.tokens_per_step, one.request.params.max_tokens - start)
            one.tokens += [(one.seed + t) % VOCAB for t in range(start, start + count)]
            one.logprobs += [-0.25] * count
            if one.spans and one.spans[-1][0] == self.weights_version:
                one.spans[-1] = (self.weights_version, one.spans[-1][1], start + count)
            else:
                one.spans.append((self.weights_version, start, start + count))
            if one.request.stream:
                text = FakeTokenizer().decode(one.tokens[start:])
                events.append(
                    SampleProgress(
                        request_id=one.request.request_id, index=one.index, start=start, token_ids=one.tokens[start:],
                        logprobs=one.logprobs[start:], text=text,
                    )
                )  # fmt: skip
            if len(one.tokens) == one.request.params.max_tokens:
                events.append(self._finish(one, "length"))
        return events

    def _finish(self, one: _Running, reason: str, error: ErrorInfo | None = None) -> SampleFinished:
        self._live.remove(one)
        params, prompt = one.request.params, one.request.prompt_token_ids
        self._stats.output_tokens += len(one.tokens)
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        sample = Sample(
            index=one.index, token_ids=one.tokens, logprobs=one.logprobs, text=FakeTokenizer().decode(one.tokens), finish_reason=reason,
            seed=one.seed, weights_versions=one.spans, error=error,
            top_logprobs=[{token: -0.25, (token + 1) % VOCAB: -2.0} for token in one.tokens] if params.logprobs else None,
            routed_experts=np.arange((len(prompt) + len(one.tokens) - 1) * 4, dtype=np.int16).reshape(-1, 2, 2)
            if params.return_routed_experts else None,
        )  # fmt: skip
        return SampleFinished(request_id=one.request.request_id, sample=sample, num_cached_tokens=0)
