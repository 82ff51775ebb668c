"""The device side of a step. In: sequences with slots and pages, prefill chunks. Out: sampled tokens per sequence, prefill results.

Between two decisions a batch decodes without touching a Python object per sequence: what a row needs lives in arrays indexed by
slot, finished rows leave the batch by a mask, and sampled tokens are recorded as they are and split by sequence at the end.
Suffixes: S slots, B live rows, N rows of all steps together, P pages, V vocabulary, K top logprobs, L MoE layers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchgen.config import EngineConfig
from batchgen.errors import ErrorInfo
from batchgen.graphs import DecodeGraphs
from batchgen.kv_cache import KVCache
from batchgen.models.qwen3_moe import ModelOutput
from batchgen.models.registry import LoadedModel
from batchgen.packing import PackedBatch
from batchgen.sampler import SampledTokens, Sampler
from batchgen.sequence import Decoded, Prefill, Prompt, Sequence

NO_TOKEN = ErrorInfo(
    code="no_token_allowed",
    message="allowed_token_ids, bad_words and min_tokens together forbid every token at this position; loosen one of them",
)
NAN_LOGITS = ErrorInfo(
    code="nan_logits",
    message="the model's logits for this sample are NaN or infinite; check the checkpoint or the last weight update",
)


@dataclass(slots=True)
class Chunk:
    """Tokens start..start+count-1 of a prefill."""

    prefill: Prefill
    start: int
    count: int

    @property
    def final(self) -> bool:
        return self.start + self.count == len(self.prefill.token_ids)


@dataclass(slots=True)
class _Records:
    """What each step of a run sampled, one tensor per step."""

    slots: list[Tensor] = field(default_factory=list)
    sampled: list[SampledTokens] = field(default_factory=list)
    routed: list[Tensor] = field(default_factory=list)


class Runner:
    """Slot arrays, KV tensors, model and sampler of one device."""

    def __init__(self, loaded: LoadedModel, kv: KVCache, config: EngineConfig, max_model_len: int):
        self.model, self.kv, self.device = loaded.model, kv, torch.device(config.device)
        self.page_size = config.page_size
        self.sampler = Sampler(loaded.config.vocab_size, config.max_num_seqs, self.device)
        num_slots, max_pages = config.max_num_seqs, -(-max_model_len // config.page_size) + 1
        capturable = self.device.type == "cuda" and loaded.model.arithmetic.kernels is not None
        self._graphs = DecodeGraphs(loaded.model, kv, num_slots, max_pages) if capturable else None

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._last_token_S, self._num_tokens_S = ints(num_slots), ints(num_slots)
        self._num_outputs_S, self._max_outputs_S = ints(num_slots), ints(num_slots)
        self._page_table_SP = ints(num_slots, max_pages)
        self._stop_ids_SK = ints(num_slots, 1)

    def admit(self, seq: Sequence, eos_ids: Seq[int], bad_word_ids: list[list[int]]) -> None:
        """Give a sequence a slot and fill the slot's arrays."""
        slot = seq.slot = self.free_slots.pop()
        params = seq.request.params
        self.sampler.set_slot(slot, params, seq.seed, seq.request.prompt_token_ids, seq.output_ids, eos_ids, bad_word_ids)
        self._num_outputs_S[slot] = len(seq.output_ids)
        self._max_outputs_S[slot] = seq.max_outputs
        self._num_tokens_S[slot] = seq.num_tokens
        if seq.output_ids:
            self._last_token_S[slot] = seq.output_ids[-1]
        stops = sorted(seq.stop_token_ids)
        if len(stops) > self._stop_ids_SK.shape[1]:
            self._stop_ids_SK = torch.nn.functional.pad(self._stop_ids_SK, (0, len(stops) - self._stop_ids_SK.shape[1]), value=-1)
        self._stop_ids_SK[slot] = -1
        self._stop_ids_SK[slot, : len(stops)] = torch.tensor(stops, dtype=torch.int64)
        self._page_table_SP[slot, : len(seq.pages)] = torch.tensor(seq.pages, dtype=torch.int64)

    def vacate(self, seq: Sequence) -> None:
        """Take the slot back."""
        self.sampler.clear_slot(seq.slot)
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def extend_pages(self, grown: list[tuple[Sequence, list[int]]]) -> None:
        """Append new pages to sequences' page tables, on the device in one write."""
        rows, columns, pages = [], [], []
        for seq, new in grown:
            for page in new:
                rows.append(seq.slot)
                columns.append(len(seq.pages))
                pages.append(page)
                seq.pages.append(page)
        if pages:
            index = torch.tensor([rows, columns], device=self.device)
            self._page_table_SP[index[0], index[1]] = torch.tensor(pages, device=self.device)

    def first_tokens(self, seqs: list[Sequence], logits_BV: Tensor, version: int) -> list[Decoded]:
        """Sample the first token of each sequence from its prompt's last logits."""
        records = _Records()
        slots_B = torch.tensor([seq.slot for seq in seqs], device=self.device)
        self._sample(logits_BV, slots_B, records)
        return self._split(seqs, records, version)

    def run(
        self, seqs: list[Sequence], chunks: list[Chunk], num_steps: int, stop_below: int, version: int
    ) -> tuple[list[Decoded], dict[int, tuple[Tensor, Tensor | None]]]:
        """Decode `seqs` for up to `num_steps` passes; the first pass carries the prefill chunks.

        Returns what each sequence got, in order, and per prefill id (logits_MV of the rows it asked for, routed experts).
        """
        records, prefilled = _Records(), {}
        slots_B = torch.tensor([seq.slot for seq in seqs], dtype=torch.int64, device=self.device)
        longest = max((seq.num_tokens for seq in seqs), default=0)
        want_routed = any(seq.request.params.return_routed_experts for seq in seqs)
        for step in range(num_steps):
            num_rows = len(slots_B)
            if step and (num_rows == 0 or num_rows < stop_below):
                break
            step_chunks = chunks if step == 0 else []
            batch = self._pack(slots_B, longest + step, step_chunks)
            batch.return_routed = want_routed or any(isinstance(c.prefill, Prompt) and c.prefill.want_routed for c in step_chunks)
            out = self._forward(batch, captured=not step_chunks)
            if step_chunks:
                prefilled = _chunk_results(step_chunks, num_rows, out.logits_MV, out.routed_TLK)
            if num_rows:
                if want_routed and out.routed_TLK is not None:
                    records.routed.append(out.routed_TLK[:num_rows])
                slots_B = self._sample(out.logits_MV[:num_rows], slots_B, records)
        return self._split(seqs, records, version), prefilled

    def _forward(self, batch: PackedBatch, captured: bool) -> ModelOutput:
        """One pass of the model; `captured`: only decode rows, which a graph may replay."""
        if self._graphs is None or not captured or batch.return_routed:
            return self.model.forward(batch, self.kv)
        return ModelOutput(logits_MV=self.model.logits(self._graphs.hidden(batch), batch.logit_index_M), routed_TLK=None)

    def _sample(self, logits_BV: Tensor, slots_B: Tensor, records: _Records) -> Tensor:
        """Sample a token for each row, record it, and return the slots of the rows that go on."""
        sampled = self.sampler.sample(logits_BV, slots_B, self._num_outputs_S[slots_B])
        records.slots.append(slots_B)
        records.sampled.append(sampled)
        num_outputs_B = self._num_outputs_S[slots_B] + 1
        self._num_outputs_S[slots_B] = num_outputs_B
        self._num_tokens_S[slots_B] += 1
        self._last_token_S[slots_B] = sampled.token_ids_B
        ended_B = (self._stop_ids_SK[slots_B] == sampled.token_ids_B[:, None]).any(1)
        ended_B |= (num_outputs_B >= self._max_outputs_S[slots_B]) | sampled.failed_B
        return slots_B[~ended_B] if bool(ended_B.any()) else slots_B

    def _pack(self, slots_B: Tensor, longest: int, chunks: list[Chunk]) -> PackedBatch:
        num_rows, size = len(slots_B), self.page_size
        num_tokens_B = self._num_tokens_S[slots_B]
        positions = [num_tokens_B - 1]
        ids = [self._last_token_S[slots_B]]
        tables = self._page_table_SP[slots_B, : -(-longest // size)]
        kv_slots = [tables.gather(1, (positions[0] // size)[:, None])[:, 0] * size + positions[0] % size] if num_rows else []
        starts, contexts, logit_rows = list(range(num_rows + 1)), [num_tokens_B], [torch.arange(num_rows, device=self.device)]
        if chunks:
            width = max([tables.shape[1]] + [len(chunk.prefill.pages) for chunk in chunks])
            page_rows = torch.zeros(num_rows + len(chunks), width, dtype=torch.int64, device=self.device)
            page_rows[:num_rows, : tables.shape[1]] = tables
            for row, chunk in enumerate(chunks, start=num_rows):
                pages = torch.tensor(chunk.prefill.pages, device=self.device)
                position = torch.arange(chunk.start, chunk.start + chunk.count, device=self.device)
                ids.append(torch.tensor(chunk.prefill.token_ids[chunk.start : chunk.start + chunk.count], device=self.device))
                positions.append(position)
                kv_slots.append(pages[position // size] * size + position % size)
                page_rows[row, : len(pages)] = pages
                first = starts[-1]
                starts.append(first + chunk.count)
                logit_rows.append(torch.arange(*_logit_range(chunk, first), device=self.device))
            contexts.append(torch.tensor([chunk.start + chunk.count for chunk in chunks], device=self.device))
            tables = page_rows
        return PackedBatch(
            input_ids_T=torch.cat(ids),
            positions_T=torch.cat(positions),
            kv_slots_T=torch.cat(kv_slots),
            query_starts=starts,
            num_decode=num_rows,
            context_lens_B=torch.cat(contexts),
            page_table_BP=tables,
            logit_index_M=torch.cat(logit_rows),
            return_routed=False,
        )

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


def _logit_range(chunk: Chunk, first: int) -> tuple[int, int]:
    """Rows of the packed batch whose logits this chunk wants; its first token is row `first`."""
    if not isinstance(chunk.prefill, Prompt):
        return first, first
    end = first + chunk.count
    if chunk.prefill.scored_by is not None:
        return first, end
    return (end - 1, end) if chunk.final else (end, end)


def _chunk_results(
    chunks: list[Chunk], num_rows: int, logits_MV: Tensor, routed_TLK: Tensor | None
) -> dict[int, tuple[Tensor, Tensor | None]]:
    results = {}
    row = token = num_rows
    for chunk in chunks:
        low, high = _logit_range(chunk, 0)
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
