"""Offline use: prompts in, groups out, no service. In: ids, text or chat messages. Out: Group per prompt, in order."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from batchgen.chat import check_template_kwargs, check_tools
from batchgen.config import EngineConfig
from batchgen.engine import Engine, UpdatePolicy
from batchgen.errors import ErrorInfo, RequestError, WeightUpdateError
from batchgen.events import PromptScored, SampleFinished
from batchgen.outputs import Group, GroupBuilder, Sample
from batchgen.request import Request, sample_seed, seed_base
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import Prompt, as_list, params_of_each, prompt_ids, tools_of
from batchgen.text.replies import Replies


class LLM:
    """An engine and its tokenizer in this process.

    `options` are the fields of EngineConfig (dtype, device, device_memory_gb, seed, deterministic, ...).
    Raises ModelError and MemoryPlanError, TypeError for an option that is not there, ValueError for a wrong one.
    """

    def __init__(self, model: str | Path, **options: Any):
        names = [field.name for field in fields(EngineConfig) if field.name != "model"]
        unknown = [name for name in options if name not in names]
        if unknown:
            raise TypeError(f"LLM has no option {unknown[0]!r}; its options are {', '.join(names)}")
        self.engine = Engine(EngineConfig(model=str(model), **options))
        self._num_requests = 0

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | list[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_sample: Callable[[int, Sample], None] | None = None,
    ) -> list[Group]:
        """Finish the whole batch. A prompt that cannot be served gets samples with finish_reason `error`; the others go on.

        `tools` (OpenAI function schemas) and `chat_template_kwargs` (`enable_thinking`, `reasoning_effort`, ...: what the model's
        template reads) are for every chat that brings none of its own in a ChatPrompt; prompts of ids or text fail with them.
        `on_sample(prompt index, sample)` is called as each sample finishes. The k-th prompt that this LLM ever got has run seed and
        k as its seed, so a repeated call draws new samples and a repeated program draws the same.
        """
        prompts = as_list(prompts)
        each = params_of_each(prompts, params)
        tools, kwargs = check_tools(tools), check_template_kwargs(chat_template_kwargs)
        builders: dict[str, tuple[int, GroupBuilder, Replies]] = {}
        groups: list[Group | None] = [None] * len(prompts)
        try:
            for position, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                request_id = str(self._num_requests)
                self._num_requests += 1
                base = seed_base(self.engine.config.seed, request_id, wanted)
                ids: list[int] = []
                try:
                    ids = prompt_ids(self.engine.tokenizer, prompt, tools, kwargs)
                    self.engine.submit(
                        Request(
                            request_id=request_id, prompt_token_ids=ids, params=wanted, sample_indices=list(range(wanted.n)), seed_base=base
                        )
                    )
                except RequestError as error:
                    groups[position] = _error_group(request_id, ids, wanted, base, error.info())
                    continue
                replies = Replies(self.engine.tokenizer, ids, tools_of(prompt, tools))
                builders[request_id] = (position, GroupBuilder(request_id, ids, wanted.n, wanted.logprobs_mode), replies)
            while builders:
                for event in self.engine.step():
                    if isinstance(event, SampleFinished) and event.request_id in builders:
                        position, builder, replies = builders[event.request_id]
                        replies.attach(event.sample)
                        if builder.add(event.sample, event.num_cached_tokens):
                            groups[position] = builders.pop(event.request_id)[1].group
                        if on_sample is not None:
                            on_sample(position, event.sample)
                    elif isinstance(event, PromptScored) and event.request_id in builders:
                        group = builders[event.request_id][1].group
                        group.prompt_logprobs, group.prompt_top_logprobs = event.prompt_logprobs, event.prompt_top_logprobs
        except BaseException:  # Ctrl-C too: what nobody waits for must not run along with the next call
            for request_id in builders:
                self.engine.abort(request_id)
            raise
        return [group for group in groups if group is not None]

    def encode(
        self, prompt: Prompt, tools: list[dict[str, Any]] | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a prompt. Raises RequestError when text or messages come without a tokenizer.

        Names of control tokens (`<|im_end|>`) in a text or a message are ordinary text, so that what a user wrote cannot close its
        turn. For a text that you rendered with a template yourself, pass `llm.engine.tokenizer.encode(text, parse_special=True)`.
        """
        return prompt_ids(self.engine.tokenizer, prompt, check_tools(tools), check_template_kwargs(chat_template_kwargs))

    def update_weights(
        self,
        named_tensors: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: UpdatePolicy = "finish",
    ) -> None:
        """Replace every weight in place (Hugging Face names). Raises WeightUpdateError and keeps the old weights when anything is wrong."""
        if isinstance(named_tensors, torch.nn.Module):
            named_tensors = named_tensors.state_dict()
        stage = self.engine.weights.open(version)
        try:
            for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
                stage.put(name, tensor)
            self.engine.commit_weights(stage, policy)
            while self.engine.weights_version != version:
                if not self.engine.has_work:
                    message = (
                        "samples are held by a pause, so policy finish would wait for ever; resume the engine or use abort or continue"
                    )
                    raise WeightUpdateError(message, code="paused")
                self.engine.step()
        except BaseException:
            self.engine.cancel_commit()
            stage.discard()
            raise


def _error_group(request_id: str, ids: list[int], params: SamplingParams, base: int, error: ErrorInfo) -> Group:
    samples = [
        Sample(
            index=i,
            token_ids=[],
            logprobs=[],
            text="",
            finish_reason="error",
            seed=sample_seed(base, i),
            weights_versions=[],
            error=error,
        )
        for i in range(params.n)
    ]
    return Group(request_id=request_id, prompt_token_ids=ids, samples=samples, logprobs_mode=params.logprobs_mode)
