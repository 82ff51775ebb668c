"""What enters the engine. In: requests. Out: checked samples filed under prompts, in order of arrival. Never touches a tensor.

Requests with the same prompt share one Prompt while it waits or computes, so a group's prompt is prefilled once however it was asked for.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from batchgen.errors import RequestError
from batchgen.events import ModelFacts
from batchgen.kv_pages import prefix_keys
from batchgen.request import Request
from batchgen.sampler import check_params
from batchgen.sequence import Prefill, Prompt, Resumption, Sequence, State


@dataclass(frozen=True, slots=True)
class Room:
    """How long a sample may get, and why if that is less than asked."""

    max_outputs: int
    detail: str | None


def check_request(request: Request, facts: ModelFacts, has_tokenizer: bool) -> None:
    """Raise a typed RequestError for anything the engine cannot serve."""
    ids, params = request.prompt_token_ids, request.params

    def refuse(code: str, message: str) -> RequestError:
        return RequestError(message, code=code, request_id=request.request_id)

    if not ids:
        raise refuse("empty_prompt", "the prompt has no tokens; give at least one")
    if len(ids) >= facts.max_model_len:
        raise refuse(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens, the engine takes {facts.max_model_len - 1} and one to generate; "
            "shorten it or raise max_model_len",
        )
    if set(map(type, ids)) != {int}:
        raise refuse("token_id_out_of_range", "prompt token ids are integers")
    if min(ids) < 0 or max(ids) >= facts.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise refuse("token_id_out_of_range", f"prompt token id {wrong} is outside the vocabulary of {facts.vocab_size}")
    if not request.sample_indices or len(set(request.sample_indices)) != len(request.sample_indices):
        raise refuse("invalid_request", f"sample_indices are distinct and not empty, got {request.sample_indices!r:.100}")
    if min(request.sample_indices) < 0 or max(request.sample_indices) >= params.n:
        raise refuse("invalid_request", f"sample_indices are 0..n-1 with n = {params.n}, got {request.sample_indices!r:.100}")
    if (params.stop or params.bad_words) and not has_tokenizer:
        raise refuse("no_tokenizer", "stop and bad_words are strings, but the model folder has no tokenizer; use stop_token_ids")
    check_params(params, facts.vocab_size)


def room_for(request: Request, facts: ModelFacts) -> Room:
    """Clamp max_tokens to what the context leaves."""
    room = facts.max_model_len - len(request.prompt_token_ids)
    if request.params.max_tokens <= room:
        return Room(request.params.max_tokens, None)
    return Room(room, f"max_tokens {request.params.max_tokens} was clamped to {room}, the room left in a context of {facts.max_model_len}")


class Intake:
    """Waiting work: resumptions first, then prompts in order of arrival."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._ids = count()
        self._prompts: dict[object, Prompt] = {}
        self.resumptions: deque[Resumption] = deque()
        self.prompts: deque[Prompt] = deque()

    def add(self, request: Request) -> None:
        """File a checked request's samples under its prompt."""
        ids, params = request.prompt_token_ids, request.params
        scored_by = request if params.prompt_logprobs is not None else None
        key = object() if scored_by else (array("q", ids).tobytes(), params.return_routed_experts)
        prompt = self._prompts.get(key)
        if prompt is None:
            keys = prefix_keys(ids, self._page_size)
            prompt = Prompt(next(self._ids), ids, keys, want_routed=params.return_routed_experts, scored_by=scored_by)
            prompt.merge_key = key
            self._prompts[key] = prompt
            self.prompts.append(prompt)
        prompt.unstarted.extend((request, index) for index in request.sample_indices)

    def add_resumption(self, seq: Sequence) -> None:
        """File a sequence that lost its pages; its KV but for the last token is computed again."""
        ids = (seq.request.prompt_token_ids + seq.output_ids)[:-1]
        keys = prefix_keys(ids, self._page_size, seq.prompt_keys[: len(ids) // self._page_size])
        self.resumptions.append(Resumption(next(self._ids), ids, keys, sequence=seq))

    def put_back(self, job: Prefill) -> None:
        """A dropped prefill waits again, ahead of those of its kind."""
        job.pages, job.num_computed, job.num_cached, job.state = [], 0, 0, State.WAITING
        if isinstance(job, Prompt):
            job.logits_V = None
            job.routed, job.score_logprobs, job.score_tops = [], [None], [{}]
            self.prompts.appendleft(job)
        elif isinstance(job, Resumption):
            self.resumptions.appendleft(job)

    def remove(self, job: Prefill) -> None:
        """Take an admitted job out of the queue it stands in."""
        if isinstance(job, Prompt):
            self.prompts.remove(job)
        elif isinstance(job, Resumption):
            self.resumptions.remove(job)

    def retire(self, prompt: Prompt) -> None:
        """All samples of the prompt have started or ended; the next equal prompt is a new one."""
        self._prompts.pop(prompt.merge_key, None)

    def known(self) -> list[Prompt]:
        """Every prompt with samples that have not started, wherever it stands."""
        return list(self._prompts.values())

    def waiting(self) -> Iterator[Prefill]:
        """Waiting jobs in the order they are to be admitted."""
        yield from self.resumptions
        yield from self.prompts
