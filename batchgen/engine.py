"""The engine. In: requests (token ids, sampling parameters) and new weights. Out: events. Single-threaded; never opens a socket.

Each `step` is one decision of the scheduler and up to `decision_interval` forward passes.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Literal

import torch

from batchgen.assemble import assemble
from batchgen.config import EngineConfig
from batchgen.coroutines import Runtime
from batchgen.errors import RequestError, WeightUpdateError
from batchgen.events import EngineStats, Event, PromptScored, SampleFinished, SampleProgress, WeightsCommitted
from batchgen.intake import Intake, check_request, room_for
from batchgen.kv_cache import KVCache
from batchgen.outputs import Sample
from batchgen.request import Request, sample_seed
from batchgen.residency import Residency, Share
from batchgen.runner import Chunk, Runner, score
from batchgen.scheduler import Limits, PrefillView, ReadyView, RunningView, SchedulerState, StepPlan, plan
from batchgen.sequence import Decoded, Finish, Prefill, PrefixComputed, Prompt, Resumption, Sequence, State
from batchgen.speculation import MOST_LIVE, Speculation
from batchgen.text.stream import TextStream
from batchgen.weights import WeightStage

UpdatePolicy = Literal["finish", "abort", "continue"]
SCORING_CHUNK = 256
"""Tokens of a prompt whose logits are held at once when its logprobs are wanted."""


class Engine:
    """One model replica on one device.

    Raises ModelError (the folder cannot be loaded) and MemoryPlanError (it does not fit the budget).
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        loaded, self.tokenizer, self.memory, self.facts = assemble(config)
        memory = self.memory
        kv = KVCache(loaded.config.cache_layout, memory.num_pages, config.page_size, loaded.dtype, config.device, memory.num_states)
        self.model, self.weights = loaded.model, loaded.store
        self.residency = Residency(kv)
        self.pool = self.residency.pool
        self.runtime = Runtime()
        self._runner = Runner(loaded, kv, config, self.memory.max_model_len)
        self._intake = Intake(config.page_size)
        self._limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            page_size=config.page_size,
            decision_interval=config.decision_interval,
        )
        self._prefilling: dict[int, Prefill] = {}
        self._ready: dict[int, Prompt] = {}
        self._live_ids: Counter[str] = Counter()
        self._next_id = 0
        self._aborts: dict[str, set[int] | None] = {}
        self._paused = False
        self._update: tuple[WeightStage, UpdatePolicy, float] | None = None
        self._stats = EngineStats()
        self._speculation = Speculation(config.num_speculative_tokens)

    @property
    def weights_version(self) -> int:
        return self.weights.version

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._aborts) or self._can_commit or (not self._paused and bool(self._live_ids))

    @property
    def _can_commit(self) -> bool:
        return self._update is not None and (self._update[1] != "finish" or self.runtime.num_live == 0)

    def submit(self, request: Request) -> None:
        """Queue a request's samples. Raises RequestError, changing nothing, when it cannot be served."""
        check_request(request, self.facts, self.tokenizer is not None)
        if request.request_id in self._live_ids:
            raise RequestError(f"request id {request.request_id!r} is still running; use another", code="duplicate_request_id")
        self._live_ids[request.request_id] = len(request.sample_indices)
        self._intake.add(request)
        self._stats.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str, sample_indices: Seq[int] | None = None) -> None:
        """End a request, or some of its samples, with reason `abort` in the next step. Unknown ids are ignored."""
        if request_id not in self._live_ids:
            return
        asked = self._aborts.get(request_id, set())
        self._aborts[request_id] = None if asked is None or sample_indices is None else asked | set(sample_indices)

    def abort_all(self) -> None:
        """End every request with reason `abort` in the next step."""
        self._aborts = dict.fromkeys(self._live_ids)

    def pause(self) -> None:
        """Stop doing device work; sequences keep their place."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False

    def commit_weights(self, stage: WeightStage, policy: UpdatePolicy = "finish") -> None:
        """Swap to the staged weights at a step boundary; a WeightsCommitted event follows.

        `finish`: running samples end under the old weights, nothing starts until then. `abort`: running samples end with reason
        `abort`. `continue`: running samples keep their tokens and go on under the new weights, their KV computed anew.
        Raises WeightUpdateError when tensors are missing or another update is pending.
        """
        if self._update is not None:
            raise WeightUpdateError(f"weights version {self._update[0].version} is still waiting to be committed", retryable=True)
        missing = stage.missing()
        if missing:
            names = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            hint = "a module's named_parameters() leaves out its buffers, its state_dict() has them"
            raise WeightUpdateError(f"{len(missing)} tensors of version {stage.version} were not sent: {names}; {hint}")
        self._update = (stage, policy, time.monotonic())

    def cancel_commit(self) -> WeightStage | None:
        """Take back a pending commit that has not happened yet; the old weights go on. Returns its stage."""
        stage = self._update[0] if self._update else None
        self._update = None
        return stage

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        s = self._stats
        s.weights_version = self.weights_version
        s.waiting = self._live_ids.total() - self.runtime.num_live
        s.running = len(self.runtime.decoding)
        s.held = self.runtime.num_live - s.running
        s.pages_total, s.pages_used = self.pool.num_pages, self.pool.num_used
        return s

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Advance everything once. Never raises for the fault of a single request."""
        started = time.monotonic()
        events: list[Event] = []
        if self._aborts:
            self._apply_aborts(events)
        if self._can_commit:
            self._commit(events)
        if not self._paused and self._live_ids:
            step_plan = plan(self._view(), self._limits)
            self._carry_out(step_plan, events)
            self._stats.steps += 1
        self._collect(events)
        self._stats.busy_s += time.monotonic() - started
        return events

    def _view(self) -> SchedulerState:
        decoding = self.runtime.decoding.values()
        tight = self.pool.num_available < (len(decoding) + 1) * (1 + self.pool.pages_for(self.config.decision_interval))
        own = self.pool.num_exclusive if tight else (lambda pages: 0)
        return SchedulerState(
            running=[RunningView(s.id, s.num_tokens, len(s.pages), own(s.pages), s.max_outputs - len(s.output_ids)) for s in decoding],
            prefilling=[self._prefill_view(job, own(job.pages)) for job in self._prefilling.values()],
            ready=[ReadyView(p.id, len(p.token_ids), len(p.unstarted), own(p.pages)) for p in self._ready.values()],
            waiting=(self._prefill_view(job, 0) for job in self._intake.waiting()),
            num_available_pages=self.pool.num_available,
            num_available_places=self.residency.places.num_available,
            admitting=self._update is None or self._update[1] != "finish",
        )

    def _prefill_view(self, job: Prefill, num_own_pages: int) -> PrefillView:
        new_pages, num_left = 0, job.num_left
        if job.state is State.WAITING:
            cached = self.residency.cached_pages(job)
            num_left -= len(cached) * self.pool.page_size
            new_pages = self.residency.num_new_pages(job, cached)
        scoring = isinstance(job, Prompt) and job.scored_by is not None
        return PrefillView(
            id=job.id,
            num_left=num_left,
            max_chunk=SCORING_CHUNK if scoring else self._limits.max_num_batched_tokens,
            new_pages=new_pages,
            num_own_pages=num_own_pages,
            num_starts=len(job.unstarted) if isinstance(job, Prompt) else 1,
            is_resumption=isinstance(job, Resumption),
        )

    def _carry_out(self, step_plan: StepPlan, events: list[Event]) -> None:
        decoding = self.runtime.decoding
        for seq in [decoding[i] for i in step_plan.yielded]:
            self._yield(seq)
        for job_id in step_plan.dropped:
            self._drop(self._ready.pop(job_id) if job_id in self._ready else self._prefilling.pop(job_id))
        first_tokens = self._start([(self._ready[prompt_id], number) for prompt_id, number in step_plan.starts])
        seqs, grown = [], []
        for seq in self.runtime.combine():
            num_tokens, left = seq.num_tokens, seq.max_outputs - len(seq.output_ids)
            if not seq.output_ids:  # its first token is sampled, but not read
                num_tokens, left = num_tokens + 1, left - 1
            if not left:
                continue
            seqs.append(seq)
            stored = num_tokens - 1 + min(step_plan.num_steps, left)
            if (lacking := self.pool.pages_for(stored) - len(seq.pages)) > 0:
                grown.append((seq, self.pool.allocate(lacking)))
        for job in list(islice(self._intake.waiting(), len(step_plan.admitted))):
            self._admit(job)
        chunks = []
        for job_id, number in step_plan.chunks:
            if job_id in self._prefilling:
                prefill = self._prefilling[job_id]
                chunks.append(Chunk(prefill, prefill.num_computed, min(number, prefill.num_left)))
        self._runner.slots.extend_pages(grown)
        only_decode = not step_plan.starts and not chunks
        if only_decode and step_plan.num_steps > self.config.num_speculative_tokens and (drafts := self._drafts(seqs)) is not None:
            self._speculate(seqs, drafts)
            return
        started = time.monotonic()
        decoded_tokens, prefilled = self._runner.run(seqs, chunks, step_plan.num_steps, step_plan.stop_below, self.weights_version)
        for seq, decoded in first_tokens():
            self._resume(seq, decoded)
        results = decoded_tokens()
        if only_decode and len(seqs) <= MOST_LIVE:
            self._speculation.note(False, sum(len(decoded.token_ids) for decoded in results), time.monotonic() - started)
        for seq, decoded in zip(seqs, results, strict=True):
            if seq.finish_reason is None:
                self._resume(seq, decoded)
        for chunk in chunks:
            self._advance(chunk, *prefilled[chunk.prefill.id], events)

    def _drafts(self, seqs: list[Sequence]) -> list[list[int]] | None:
        """What to have the model check in one pass in place of decoding; None: decode."""
        drafts = self._speculation.drafts(seqs)
        return drafts if drafts is not None and self._runner.takes_drafts(seqs) else None

    def _speculate(self, seqs: list[Sequence], drafts: list[list[int]]) -> None:
        started = time.monotonic()
        results = self._runner.verify(seqs, drafts, self.weights_version)
        num_tokens = sum(len(decoded.token_ids) for decoded in results)
        self._stats.drafted_tokens += sum(map(len, drafts))
        self._stats.accepted_tokens += num_tokens - len(seqs)
        for seq, decoded in zip(seqs, results, strict=True):
            self._resume(seq, decoded)
        self._runner.slots.fill([seq for seq in seqs if seq.finish_reason is None])
        self._speculation.note(True, num_tokens, time.monotonic() - started)

    def _yield(self, seq: Sequence) -> None:
        self.residency.publish(seq)
        self._runner.vacate(seq)
        self.residency.release(seq)
        self.runtime.yield_(seq)
        self._intake.add_resumption(seq)
        self._stats.preemptions += 1

    def _drop(self, job: Prefill) -> None:
        self.residency.release(job)
        self._intake.put_back(job)

    def _admit(self, job: Prefill) -> None:
        if not self.residency.admit(job):
            return
        self._intake.remove(job)
        self._stats.cached_prompt_tokens += job.num_cached
        if job.num_left:
            self._prefilling[job.id] = job
        else:
            self._resume_from(job)

    def _start(self, starts: list[tuple[Prompt, int]]) -> Callable[[], list[tuple[Sequence, Decoded]]]:
        """Start samples of computed prompts and sample every first token in one go; what is returned reads them."""
        if not starts:
            return list
        seqs, logit_rows, shares = [], [], iter(self.residency.share(starts))
        for row, (prompt, number) in enumerate(starts):
            for _ in range(number):
                request, index = prompt.unstarted.popleft()
                seqs.append(self._new_sequence(prompt, request, index, next(shares)))
                logit_rows.append(row)
            if not prompt.unstarted:
                self._intake.retire(prompt)
                del self._ready[prompt.id]
        self._occupy(seqs)
        self.runtime.start(seqs)
        logits_RV = torch.stack([prompt.logits_V for prompt, _ in starts])
        logits_BV = logits_RV[torch.tensor(logit_rows, device=logits_RV.device)]
        read = self._runner.first_tokens(seqs, logits_BV, self.weights_version)
        return lambda: list(zip(seqs, read(), strict=True))

    def _new_sequence(self, prompt: Prompt, request: Request, index: int, share: Share) -> Sequence:
        params, room = request.params, room_for(request, self.facts)
        eos_ids = [] if params.ignore_eos else self.facts.eos_token_ids
        seq = Sequence(
            id=self._next_id,
            request=request,
            index=index,
            seed=sample_seed(request.seed_base, index),
            max_outputs=room.max_outputs,
            detail=room.detail,
            num_cached=prompt.num_cached,
            stop_token_ids=frozenset(eos_ids) | frozenset(params.stop_token_ids or ()),
            pages=share.pages,
            place=share.place,
            prompt_keys=prompt.keys,
            num_computed=len(prompt.token_ids),
            routed=list(prompt.routed) if params.return_routed_experts else [],
        )
        self._next_id += 1
        if self.tokenizer is not None and (params.stop or request.stream):
            stop = params.stop or []
            seq.stream = TextStream(self.tokenizer, stop=stop, include_stop=params.include_stop, min_tokens=params.min_tokens)
        return seq

    def _occupy(self, seqs: list[Sequence]) -> None:
        self._runner.admit(seqs, self.facts.eos_token_ids, self._bad_word_ids)

    def _bad_word_ids(self, seq: Sequence) -> list[list[int]]:
        bad_words = seq.request.params.bad_words
        return self.tokenizer.bad_word_ids(bad_words) if self.tokenizer and bad_words else []

    def _advance(self, chunk: Chunk, logits_MV: torch.Tensor, routed_TLK: torch.Tensor | None, events: list[Event]) -> None:
        """Account for a computed chunk; a complete prefill becomes ready or resumes its sequence."""
        job = chunk.prefill
        job.num_computed += chunk.count
        self._stats.prefill_tokens += chunk.count
        full = job.num_computed // self.pool.page_size
        self.pool.publish(job.pages[:full], job.keys[:full])
        if isinstance(job, Prompt):
            if job.want_routed and routed_TLK is not None:
                job.routed.append(routed_TLK.cpu().numpy())
            if job.scored_by is not None:
                score(job, chunk, logits_MV)
        if job.num_left:
            return
        del self._prefilling[job.id]
        if isinstance(job, Prompt):
            job.state = State.READY
            job.logits_V = logits_MV[-1]
            self._ready[job.id] = job
            if job.scored_by is not None:
                tops = job.score_tops if job.scored_by.params.prompt_logprobs else None
                events.append(
                    PromptScored(request_id=job.scored_by.request_id, prompt_logprobs=job.score_logprobs, prompt_top_logprobs=tops)
                )
        else:
            self._resume_from(job)

    def _resume_from(self, job: Prefill) -> None:
        assert isinstance(job, Resumption)
        seq = job.sequence
        seq.pages, seq.place = job.pages, job.place
        self._occupy([seq])
        self._resume(seq, PrefixComputed(pages=job.pages, place=job.place))

    def _resume(self, seq: Sequence, event: Decoded | PrefixComputed | Finish) -> None:
        if isinstance(event, Decoded):
            before = len(seq.output_ids)
            self.runtime.resume(seq, event)
            self._stats.output_tokens += len(seq.output_ids) - before
        else:
            self.runtime.resume(seq, event)

    def _apply_aborts(self, events: list[Event]) -> None:
        aborts, self._aborts = self._aborts, {}

        def hit(request: Request, index: int) -> bool:
            if request.request_id not in aborts:
                return False
            indices = aborts[request.request_id]
            return indices is None or index in indices

        for seq in self.runtime.sequences():
            if hit(seq.request, seq.index):
                self.runtime.resume(seq, Finish(reason="abort"))
        for prompt in self._intake.known():
            gone = [pair for pair in prompt.unstarted if hit(*pair)]
            if not gone:
                continue
            prompt.unstarted = type(prompt.unstarted)(pair for pair in prompt.unstarted if not hit(*pair))
            for request, index in gone:
                self._finish(request.request_id, _unstarted_sample(request, index), 0, events)
            if not prompt.unstarted:
                self._forget(prompt)
        self._collect(events)

    def _forget(self, prompt: Prompt) -> None:
        self._intake.retire(prompt)
        if prompt.state is State.WAITING:
            self._intake.remove(prompt)
        else:
            self._prefilling.pop(prompt.id, None)
            self._ready.pop(prompt.id, None)
            self.residency.release(prompt)

    def _commit(self, events: list[Event]) -> None:
        """Swap the weights, and drop everything that was computed by the old ones."""
        assert self._update is not None
        stage, policy, asked = self._update
        if policy == "abort":
            for seq in self.runtime.sequences():
                self.runtime.resume(seq, Finish(reason="abort"))
            self._collect(events)
        self._update = None
        for seq in list(self.runtime.decoding.values()):
            self._yield(seq)
        for job in [*reversed(self._prefilling.values()), *reversed(self._ready.values())]:
            self._drop(job)
        self._prefilling.clear()
        self._ready.clear()
        self.pool.drop_cache()
        stage.commit()
        paused = time.monotonic() - asked
        self._stats.weight_updates += 1
        self._stats.update_paused_s += paused
        events.append(WeightsCommitted(version=stage.version, paused_s=paused))

    def _collect(self, events: list[Event]) -> None:
        """Report progress and take finished sequences apart."""
        for seq in self.runtime.take_finished():
            self._speculation.learn(seq)
            if seq.pages:
                self.residency.publish(seq)
                self.residency.release(seq)
            if seq.slot >= 0:
                self._runner.vacate(seq)
            else:
                self._forget_resumption(seq)
            text = self._text(seq)
            if seq.request.stream:
                self._report(seq, events)
            self._finish(seq.request.request_id, seq.sample(text), seq.num_cached, events)
        for seq in self.runtime.decoding.values():
            if seq.request.stream:
                self._report(seq, events)

    def _forget_resumption(self, seq: Sequence) -> None:
        """Drop the prefill of a sequence that ended while it waited for its KV."""
        for job in [*self._intake.resumptions, *self._prefilling.values()]:
            if isinstance(job, Resumption) and job.sequence is seq:
                if job.state is State.WAITING:
                    self._intake.remove(job)
                else:
                    self.residency.release(job)
                    del self._prefilling[job.id]

    def _text(self, seq: Sequence) -> str:
        if seq.stream is not None:
            seq.new_text += seq.stream.finish()
            return seq.stream.text
        if self.tokenizer is None:
            return ""
        ids = seq.output_ids
        if isinstance(seq.stop_match, int) and not seq.request.params.include_stop:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def _report(self, seq: Sequence, events: list[Event]) -> None:
        start = seq.num_reported
        if start == len(seq.output_ids) and not seq.new_text:
            return
        events.append(
            SampleProgress(
                request_id=seq.request.request_id,
                index=seq.index,
                start=start,
                token_ids=seq.output_ids[start:],
                logprobs=seq.logprobs[start:],
                text=seq.new_text,
            )
        )
        seq.num_reported, seq.new_text = len(seq.output_ids), ""

    def _finish(self, request_id: str, sample: Sample, num_cached: int, events: list[Event]) -> None:
        self._live_ids[request_id] -= 1
        if not self._live_ids[request_id]:
            del self._live_ids[request_id]
            self._speculation.forget(request_id)
        reason = sample.finish_reason
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        events.append(SampleFinished(request_id=request_id, sample=sample, num_cached_tokens=num_cached))


def _unstarted_sample(request: Request, index: int) -> Sample:
    seed = sample_seed(request.seed_base, index)
    return Sample(index=index, token_ids=[], logprobs=[], text="", finish_reason="abort", seed=seed, weights_versions=[])
