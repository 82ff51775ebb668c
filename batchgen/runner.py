"""The device side of a step. In: sequences with slots and pages, prefill chunks. Out: sampled tokens per sequence, prefill results.

Between two decisions a batch decodes without touching a Python object per sequence: what a row needs lives in `Slots`, and sampled
tokens are recorded as they are and split by sequence at the end. On a GPU a whole step is one graph, and nothing waits for it.

Suffixes: B rows, T rows of a captured step, N rows of all steps together, P pages, V vocabulary, K top logprobs or experts, L MoE layers.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from batchgen.config import EngineConfig
from batchgen.errors import ErrorInfo
from batchgen.graphs import Graphs, padded
from batchgen.kv_cache import KVCache
from batchgen.models.registry import LoadedModel
from batchgen.packing import PackedBatch
from batchgen.prefixes import SharedPrefixes, shared_runs
from batchgen.sampler import SampledTokens, Sampler, prompt_logprobs
from batchgen.sequence import Decoded, Prefill, Prompt, Sequence
from batchgen.slots import Slots

NO_TOKEN = ErrorInfo(
    code="no_token_allowed",
    message="allowed_token_ids, bad_words and min_tokens together forbid every token at this position; loosen one of them",
)
NAN_LOGITS = ErrorInfo(
    code="nan_logits",
    message="the model's logits for this sample are NaN or infinite; check the checkpoint or the last weight update",
)


@dataclass(slots=True, kw_only=True)
class Piece:
    """Tokens of one sequence that go through the model together, and where they belong."""

    ids: list[int]
    start: int
    """Position of the first."""
    pages: list[int]
    place: int
    wanted: tuple[int, int]
    """Those whose logits are asked for, from and to, counted from the first."""


@dataclass(slots=True)
class Chunk:
    """Tokens start..start+count-1 of a prefill."""

    prefill: Prefill
    start: int
    count: int

    @property
    def final(self) -> bool:
        return self.start + self.count == len(self.prefill.token_ids)

    def piece(self) -> Piece:
        """What goes into the pass."""
        prefill, end = self.prefill, self.start + self.count
        return Piece(
            ids=prefill.token_ids[self.start : end], start=self.start, pages=prefill.pages, place=prefill.place, wanted=_logit_range(self)
        )


@dataclass(slots=True, kw_only=True)
class _Step:
    """Results of a captured step."""

    live_T: Tensor
    sampled: SampledTokens
    routed_TLK: Tensor | None


@dataclass(slots=True)
class _Records:
    """What each step of a run sampled, one entry per step."""

    slots: list[Tensor] = field(default_factory=list)
    """The spare slot where a row's sequence had ended."""
    sampled: list[SampledTokens] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)

    def on_host(self) -> "_Records":
        """A copy in pinned memory, complete when the device has done what it was given before."""

        def copied(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

        sampled = [each.mapped(copied) for each in self.sampled]
        return _Records([copied(each) for each in self.slots], sampled, [copied(each) for each in self.routed])


class Runner:
    """Slot arrays, KV tensors, model and sampler of one device."""

    def __init__(self, loaded: LoadedModel, kv: KVCache, config: EngineConfig, max_model_len: int):
        self.model, self.kv, self.device = loaded.model, kv, torch.device(config.device)
        self.sampler = Sampler(loaded.config.vocab_size, config.max_num_seqs, self.device)
        self.slots = Slots(config.max_num_seqs, -(-max_model_len // config.page_size) + 1, kv)
        self._page_size = config.page_size
        self._on_gpu = self.device.type == "cuda"
        self._graphs: Graphs[_Step] | None = Graphs() if loaded.model.capturable else None
        self._prefixes = SharedPrefixes(padded(config.max_num_seqs), config.page_size, self.slots.page_table_SP)
        self._rows_T = torch.full((padded(config.max_num_seqs),), self.slots.spare, dtype=torch.int64, device=self.device)

    def admit(self, seqs: Seq[Sequence], eos_ids: Seq[int], bad_word_ids: Callable[[Sequence], list[list[int]]]) -> None:
        """Give sequences slots and fill the slots' arrays. `eos_ids` end those that do not ignore them."""
        for seq in seqs:
            slot = seq.slot = self.slots.free.pop()
            params, prompt_ids = seq.request.params, seq.request.prompt_token_ids
            ends = [] if params.ignore_eos else eos_ids
            self.sampler.set_slot(slot, params, seq.seed, prompt_ids, seq.output_ids, ends, bad_word_ids(seq))
        self.slots.fill(seqs)

    def vacate(self, seq: Sequence) -> None:
        """Take the slot back."""
        self.sampler.clear_slot(seq.slot)
        self.slots.free.append(seq.slot)
        seq.slot = -1

    def first_tokens(self, seqs: list[Sequence], logits_BV: Tensor, version: int) -> Callable[[], list[Decoded]]:
        """Sample the first token of each sequence from its prompt's last logits. What is returned gives the results when it is called, and
        waits for no work that was begun after this."""
        records = _Records()
        slots = np.array([seq.slot for seq in seqs])
        self._sample(logits_BV, slots, torch.from_numpy(slots).to(self.device), records)
        if not self._on_gpu:
            return lambda: self._split(seqs, records, version)
        on_host, done = records.on_host(), torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def read() -> list[Decoded]:
            done.synchronize()
            return self._split(seqs, on_host, version)

        return read

    def run(
        self, seqs: list[Sequence], chunks: list[Chunk], num_steps: int, stop_below: int, version: int
    ) -> tuple[Callable[[], list[Decoded]], dict[int, tuple[Tensor, Tensor | None]]]:
        """Decode `seqs` for up to `num_steps` passes; the first pass carries the prefill chunks. Sequences may have ended with a first
        token that the host has not taken in; when it has, it can read what this gives.

        Returns what reads what each sequence got, in order, and per prefill id (logits_MV of the rows it asked for, routed experts). On
        a CPU, rows that end leave the batch at once, and the run ends once fewer than `stop_below` are left; a GPU is never asked how many.
        """
        records, prefilled = _Records(), {}
        slots = np.array([seq.slot for seq in seqs], dtype=np.int64)
        slots_B = torch.from_numpy(slots).to(self.device)
        longest = max((seq.num_tokens + (not seq.output_ids) for seq in seqs), default=0)  # a first token may not have been read
        want_routed = any(seq.request.params.return_routed_experts for seq in seqs)
        sharing = self._share(seqs, slots)
        for step in range(num_steps):
            if not self._on_gpu:
                slots_B = slots_B[~self.slots.ended_S[slots_B]]
                slots = slots_B.numpy()
            if (len(slots) == 0 and (step or not chunks)) or (step and len(slots) < stop_below):
                break
            if step == 0 and chunks:
                prefilled = self._mixed(slots, slots_B, longest, chunks, sharing, want_routed, records)
            elif self._graphs is not None and self.sampler.is_plain(slots):
                self._captured(slots_B, sharing, want_routed, records)
            else:
                live_B = self.slots.live(slots_B)
                batch = self.slots.decode_batch(live_B, -(-(longest + step) // self._page_size))
                batch.return_routed = want_routed
                batch.shared = self._prefixes.view(len(slots)) if sharing else None
                out = self.model.forward(batch, self.kv)
                self._sample(out.logits_MV, slots, live_B, records)
                if out.routed_TLK is not None:
                    records.routed.append(out.routed_TLK)
        return lambda: self._split(seqs, records, version), prefilled

    def _mixed(
        self, slots: np.ndarray, slots_B: Tensor, longest: int, chunks: list[Chunk], sharing: bool, want_routed: bool, records: _Records
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """One pass over the rows and the prefill chunks; results by prefill id."""
        live_B, num_rows = self.slots.live(slots_B), len(slots)
        batch = self._pack(self.slots.decode_batch(live_B, -(-longest // self._page_size)), [chunk.piece() for chunk in chunks])
        batch.shared = self._prefixes.view(num_rows) if sharing else None
        batch.return_routed = want_routed or any(isinstance(c.prefill, Prompt) and c.prefill.want_routed for c in chunks)
        out = self.model.forward(batch, self.kv)
        if num_rows:
            self._sample(out.logits_MV[:num_rows], slots, live_B, records)
            if want_routed and out.routed_TLK is not None:
                records.routed.append(out.routed_TLK[:num_rows])
        return _chunk_results(chunks, num_rows, out.logits_MV, out.routed_TLK)

    def _share(self, seqs: list[Sequence], slots: np.ndarray) -> bool:
        """Find the rows whose first pages are the same, where attention reads those once."""
        max_rows = self.model.attention.max_shared_rows
        runs = shared_runs([seq.pages for seq in seqs], max_rows) if max_rows > 1 else []
        if runs:
            self._prefixes.fill(runs, slots)
        return bool(runs)

    def _captured(self, slots_B: Tensor, sharing: bool, want_routed: bool, records: _Records) -> None:
        """One decode step with sampling, replayed as a graph over a padded number of rows."""
        assert self._graphs is not None
        num_rows = len(slots_B)
        size = padded(num_rows)
        self._rows_T[:num_rows] = slots_B
        self._rows_T[num_rows:size] = self.slots.spare
        step = self._graphs.run((size, sharing, want_routed), lambda: self._step(self._rows_T[:size], sharing, want_routed))
        records.slots.append(step.live_T[:num_rows].clone())
        records.sampled.append(step.sampled.first(num_rows))
        if step.routed_TLK is not None:
            records.routed.append(step.routed_TLK[:num_rows].clone())

    def _step(self, rows_T: Tensor, sharing: bool, want_routed: bool) -> _Step:
        live_T = self.slots.live(rows_T)
        batch = self.slots.decode_batch(live_T, self.slots.page_table_SP.shape[1])
        batch.return_routed = want_routed
        batch.shared = self._prefixes.view(len(rows_T)) if sharing else None
        hidden_TD, routed_TLK = self.model.hidden(batch, self.kv)
        logits_TV = self.model.logits(hidden_TD, batch.logit_index_M)
        sampled = self.sampler.sample_plain(logits_TV, live_T, self.slots.num_outputs_S[live_T])
        self.slots.advance(live_T, sampled.token_ids_B, sampled.failed_B)
        return _Step(live_T=live_T, sampled=sampled, routed_TLK=routed_TLK)

    def _sample(self, logits_BV: Tensor, slots: np.ndarray, live_B: Tensor, records: _Records) -> None:
        """Sample a token for each row of `slots` (`live_B`: of those that have not ended), and record it."""
        num_outputs_B = self.slots.num_outputs_S[live_B]
        if self._graphs is not None and self.sampler.is_plain(slots):
            sampled = self.sampler.sample_plain(logits_BV, live_B, num_outputs_B)
        else:
            sampled = self.sampler.sample(logits_BV, slots, num_outputs_B)
        records.slots.append(live_B)
        records.sampled.append(sampled)
        self.slots.advance(live_B, sampled.token_ids_B, sampled.failed_B)

    def _pack(self, rows: PackedBatch, pieces: list[Piece]) -> PackedBatch:
        """The decode rows, and behind them the pieces."""
        num_rows, old_width = rows.page_table_BP.shape
        counts = [len(piece.ids) for piece in pieces]
        starts = list(accumulate(counts, initial=num_rows))
        pages = [np.asarray(piece.pages) for piece in pieces]
        positions = [np.arange(piece.start, piece.start + count) for piece, count in zip(pieces, counts, strict=True)]
        slots = [own[at // self._page_size] * self._page_size + at % self._page_size for own, at in zip(pages, positions, strict=True)]
        logit_rows = [np.arange(first + piece.wanted[0], first + piece.wanted[1]) for piece, first in zip(pieces, starts, strict=False)]
        table = np.zeros((len(pieces), max([old_width, *map(len, pages)])), np.int64)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        ids = np.concatenate([np.asarray(piece.ids) for piece in pieces])
        ids_T, positions_T, slots_T = self._tensor([ids, np.concatenate(positions), np.concatenate(slots)])
        contexts = [piece.start + count for piece, count in zip(pieces, counts, strict=True)]
        return PackedBatch(
            input_ids_T=torch.cat([rows.input_ids_T, ids_T]),
            positions_T=torch.cat([rows.positions_T, positions_T]),
            kv_slots_T=torch.cat([rows.kv_slots_T, slots_T]),
            query_starts=[*range(num_rows), *starts],
            num_decode=num_rows,
            context_lens_B=torch.cat([rows.context_lens_B, self._tensor(contexts)]),
            page_table_BP=torch.cat([F.pad(rows.page_table_BP, (0, table.shape[1] - old_width)), self._tensor(table)]),
            logit_index_M=torch.cat([rows.logit_index_M, self._tensor(np.concatenate(logit_rows))]),
            prefill_contexts=contexts,
            state_B=None if rows.state_B is None else torch.cat([rows.state_B, self._tensor([piece.place for piece in pieces])]),
            return_routed=False,
        )

    def takes_drafts(self, seqs: list[Sequence]) -> bool:
        """Whether `verify` can: the model carries no states, which cannot be taken back, and the sequences ask for their tokens alone."""
        plain = self.sampler.is_plain([seq.slot for seq in seqs])
        return not self.kv.num_states and plain and not any(seq.request.params.return_routed_experts for seq in seqs)

    def verify(self, seqs: list[Sequence], drafts: list[list[int]], version: int) -> list[Decoded]:
        """One pass over each sequence's last token and its draft: the tokens that the model samples, up to the first that is not the
        draft's. Those of the sequences that go on are to be filled in `slots` again."""
        pieces = [
            Piece(ids=[seq.output_ids[-1], *draft], start=seq.num_tokens - 1, pages=seq.pages, place=seq.place, wanted=(0, len(draft) + 1))
            for seq, draft in zip(seqs, drafts, strict=True)
        ]
        none_B = torch.zeros(0, dtype=torch.int64, device=self.device)
        out = self.model.forward(self._pack(self.slots.decode_batch(none_B, 0), pieces), self.kv)
        counts = [len(piece.ids) for piece in pieces]
        slots = np.repeat([seq.slot for seq in seqs], counts)
        num_outputs = np.concatenate([np.arange(len(seq.output_ids), len(seq.output_ids) + n) for seq, n in zip(seqs, counts, strict=True)])
        num_outputs_M = self._tensor(num_outputs)
        if self._graphs is None:
            sampled = self.sampler.sample(out.logits_MV, slots, num_outputs_M)
        else:
            sampled = self.sampler.sample_plain(out.logits_MV, self._tensor(slots), num_outputs_M)
        tokens, logprobs, failed = sampled.token_ids_B.tolist(), sampled.logprobs_B.tolist(), sampled.failed_B.tolist()
        results, first = [], 0
        for seq, draft in zip(seqs, drafts, strict=True):
            count = 1
            while count <= len(draft) and tokens[first + count - 1] == draft[count - 1] and not failed[first + count - 1]:
                if draft[count - 1] in seq.stop_token_ids:
                    break
                count += 1
            decoded = Decoded(token_ids=tokens[first : first + count], logprobs=logprobs[first : first + count], version=version)
            _judge(decoded, seq, NAN_LOGITS if failed[first + count - 1] else None)
            results.append(decoded)
            first += len(draft) + 1
        return results

    def _tensor(self, values: np.ndarray | list[np.ndarray] | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device, non_blocking=True)

    def _split(self, seqs: list[Sequence], records: _Records, version: int) -> list[Decoded]:
        """Recorded rows, regrouped by sequence."""
        if not records.slots:
            return [Decoded(token_ids=[], logprobs=[], version=version) for _ in seqs]
        slots_N = torch.cat(records.slots).cpu().numpy()
        order_N = np.argsort(slots_N, kind="stable")
        edges = np.searchsorted(slots_N[order_N], [(seq.slot, seq.slot + 1) for seq in seqs])
        sorted_N = torch.from_numpy(order_N)
        tokens = _column([s.token_ids_B for s in records.sampled])[sorted_N].tolist()
        logprobs = _column([s.logprobs_B for s in records.sampled])[sorted_N].tolist()
        failed = _column([s.failed_B for s in records.sampled])[sorted_N].tolist()
        blocked = _column([s.blocked_B for s in records.sampled])[sorted_N].tolist()
        tops = _tops(records.sampled, sorted_N) if any(seq.request.params.logprobs for seq in seqs) else None
        routed = _column(records.routed)[sorted_N].numpy() if records.routed else None
        results = []
        for seq, (start, end) in zip(seqs, edges.tolist(), strict=True):
            decoded = Decoded(token_ids=tokens[start:end], logprobs=logprobs[start:end], version=version)
            top_k = seq.request.params.logprobs
            if tops is not None and top_k:
                decoded.tops = [dict(zip(ids[:top_k], values[:top_k], strict=True)) for ids, values in tops[start:end]]
            if routed is not None and seq.request.params.return_routed_experts:
                decoded.routed = routed[start:end]
            if end > start:
                fault = (NO_TOKEN if blocked[end - 1] else NAN_LOGITS) if failed[end - 1] else None
                _judge(decoded, seq, fault)
            results.append(decoded)
        return results


def _judge(decoded: Decoded, seq: Sequence, fault: ErrorInfo | None) -> None:
    """Set the reason if the last token, or the lack of one, ended the sample."""
    if fault is not None:
        decoded.token_ids, decoded.logprobs = decoded.token_ids[:-1], decoded.logprobs[:-1]
        decoded.tops = decoded.tops[:-1] if decoded.tops else None
        decoded.reason, decoded.error = "error", fault
    elif decoded.token_ids[-1] in seq.stop_token_ids:
        decoded.reason = "stop"
    elif len(seq.output_ids) + len(decoded.token_ids) >= seq.max_outputs:
        decoded.reason = "length"


def _logit_range(chunk: Chunk) -> tuple[int, int]:
    """Tokens of the chunk whose logits it wants."""
    if not isinstance(chunk.prefill, Prompt):
        return 0, 0
    if chunk.prefill.scored_by is not None:
        return 0, chunk.count
    return (chunk.count - 1, chunk.count) if chunk.final else (chunk.count, chunk.count)


def _chunk_results(
    chunks: list[Chunk], num_rows: int, logits_MV: Tensor, routed_TLK: Tensor | None
) -> dict[int, tuple[Tensor, Tensor | None]]:
    results = {}
    row = token = num_rows
    for chunk in chunks:
        low, high = _logit_range(chunk)
        routed = None if routed_TLK is None else routed_TLK[token : token + chunk.count]
        results[chunk.prefill.id] = (logits_MV[row : row + high - low], routed)
        row += high - low
        token += chunk.count
    return results


def _column(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).cpu()


def _tops(sampled: list[SampledTokens], sorted_N: Tensor) -> list[tuple[list[int], list[float]]]:
    """(ids, logprobs) per recorded row; steps may carry different K."""
    rows: list[tuple[list[int], list[float]]] = []
    for step in sampled:
        if step.top_ids_BK is None or step.top_logprobs_BK is None:
            rows += [([], [])] * len(step.token_ids_B)
        else:
            rows += zip(step.top_ids_BK.tolist(), step.top_logprobs_BK.tolist(), strict=True)
    return [rows[i] for i in sorted_N.tolist()]


def score(prompt: Prompt, chunk: Chunk, logits_MV: Tensor) -> None:
    """Add the logprobs of the chunk's tokens, each by the logits of the one before, to what the prompt has."""
    assert prompt.scored_by is not None
    params = prompt.scored_by.params
    targets = prompt.token_ids[chunk.start + 1 : chunk.start + chunk.count + 1]
    if not targets:
        return
    targets_M = torch.tensor(targets, device=logits_MV.device)
    temperature = 1.0 if params.greedy else params.temperature
    logprobs_M, top_ids_MK, tops_MK = prompt_logprobs(
        logits_MV[: len(targets)], targets_M, params.prompt_logprobs or 0, temperature, params.logprobs_mode
    )
    prompt.score_logprobs += logprobs_M.tolist()
    if params.prompt_logprobs and top_ids_MK is not None and tops_MK is not None:
        prompt.score_tops += [dict(zip(i, v, strict=True)) for i, v in zip(top_ids_MK.tolist(), tops_MK.tolist(), strict=True)]
