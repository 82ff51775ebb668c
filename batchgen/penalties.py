"""Change logits as requests want. In: logits and per-slot rules. Out: adjusted logits. Keeps output counts and recent tokens current.

Order: repetition, presence and frequency penalties → logit_bias → allowed_token_ids → bad_words and min_tokens masks.

Shapes: S slots, V vocabulary, R rows of the count tables, U tokens that occur, B batch rows, A those of them with any rule,
P those with penalties, W those with bad words, E entries (one token of one slot's rule each), L recent tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.sampling_params import SamplingParams

_NO_TOKEN = -1
"""In a tail: the output is shorter than the tail."""
_ANY_TOKEN = -2
"""In a bad word's prefix: the word is shorter than the longest one."""

Rows = Tensor | slice
"""Index of some rows of a batch; slice(None) for all of them, which costs no copy."""


def rows_of(mask_B: np.ndarray, device: torch.device | str) -> Rows:
    return slice(None) if mask_B.all() else torch.from_numpy(mask_B.nonzero()[0]).to(device)


class _Entries:
    """(slot, token, value) rows of one kind of rule, all slots together."""

    def __init__(self, values_E: np.ndarray):
        self.slots_E = np.zeros(0, np.int64)
        self.tokens_E = np.zeros(0, np.int64)
        self.values_E = values_E

    def add(self, slot: int, tokens: Sequence[int], values: object) -> None:
        new_E = np.broadcast_to(np.asarray(values, self.values_E.dtype), (len(tokens), *self.values_E.shape[1:]))
        self.slots_E = np.append(self.slots_E, np.full(len(tokens), slot))
        self.tokens_E = np.append(self.tokens_E, np.asarray(tokens, np.int64))
        self.values_E = np.concatenate([self.values_E, new_E])

    def drop(self, slot: int) -> None:
        keep = self.slots_E != slot
        self.slots_E, self.tokens_E, self.values_E = self.slots_E[keep], self.tokens_E[keep], self.values_E[keep]

    def select(self, row_of_slot_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(row, token, value) of the entries whose slot has a row; None if there are none."""
        rows_E = row_of_slot_S[self.slots_E]
        keep = rows_E >= 0
        return (rows_E[keep], self.tokens_E[keep], self.values_E[keep]) if keep.any() else None


@dataclass(slots=True, kw_only=True)
class _Penalties:
    rows_P: Tensor
    """Rows of [A, V]."""
    batch_P: Tensor
    """The same rows in the batch."""
    tables_P: Tensor
    repetition_P: Tensor | None
    presence_P: Tensor
    frequency_P: Tensor


@dataclass(slots=True, kw_only=True)
class _Words:
    flat_E: Tensor
    slots_E: Tensor
    prefix_EL: Tensor
    slots_W: Tensor
    batch_W: Tensor


@dataclass(slots=True, kw_only=True)
class RuleSelection:
    """The rules of one choice of slots. `flat` indices point into [A, V]; None where no slot has such a rule."""

    rows_A: Rows
    """Batch rows that any rule touches."""
    penalties: _Penalties | None
    bias: tuple[Tensor, Tensor] | None
    """(flat_E, value_E)"""
    allowed: tuple[Tensor, Tensor] | None
    """(flat_E, rows that have the rule)"""
    minimum: tuple[Tensor, Tensor, Tensor] | None
    """(flat_E, batch_E, min_tokens_E)"""
    words: _Words | None


class LogitRules:
    """Penalties, biases and masks of all slots."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device | str):
        self.vocab_size = vocab_size
        self.device = device
        self.active_S = np.zeros(num_slots, bool)
        """Slots with any rule."""
        self._penalties_S3 = np.zeros((num_slots, 3))
        self._table_S = np.full(num_slots, -1)
        self._free_tables: list[int] = []
        self._counts_RV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seen_RV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._touched_RU = torch.zeros(0, 256, dtype=torch.int64, device=device)
        """The tokens of prompt or output, each once: the first `used` of a row."""
        self._used_R = torch.zeros(0, dtype=torch.int64, device=device)
        self._bias = _Entries(np.zeros(0))
        self._allowed = _Entries(np.zeros(0, bool))
        self._minimum = _Entries(np.zeros(0, np.int64))
        self._words = _Entries(np.zeros((0, 0), np.int64))
        self._tail_SL = torch.full((num_slots, 0), _NO_TOKEN, dtype=torch.int64, device=device)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        bad_word_ids: Sequence[Sequence[int]],
    ) -> None:
        """Take over a slot's rules, with the state its output so far has left."""
        self.clear_slot(slot)
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            self._penalties_S3[slot] = penalties
            self._fill_table(slot, prompt_token_ids, output_token_ids)
        if params.logit_bias:
            self._bias.add(slot, list(params.logit_bias), list(params.logit_bias.values()))
        if params.allowed_token_ids is not None:
            self._allowed.add(slot, sorted(set(params.allowed_token_ids)), True)
        if params.min_tokens:
            self._minimum.add(slot, sorted({*eos_token_ids, *(params.stop_token_ids or ())}), params.min_tokens)
        if words := [word for word in bad_word_ids if word]:
            self._add_words(slot, words, output_token_ids)
        ends = bool(params.min_tokens) and bool(eos_token_ids or params.stop_token_ids)
        listed = bool(params.logit_bias) or params.allowed_token_ids is not None or ends or bool(words)
        self.active_S[slot] = self._table_S[slot] >= 0 or listed

    def clear_slot(self, slot: int) -> None:
        if self.active_S[slot]:
            self.active_S[slot] = False
            if self._table_S[slot] >= 0:
                self._free_tables.append(int(self._table_S[slot]))
                self._table_S[slot] = -1
            for entries in (self._bias, self._allowed, self._minimum, self._words):
                entries.drop(slot)

    def select(self, slots_B: np.ndarray) -> RuleSelection | None:
        """Gather the rules of a batch's slots; None if none has any."""
        batch_A = self.active_S[slots_B].nonzero()[0]
        if not len(batch_A):
            return None
        slots_A = slots_B[batch_A]
        row_of_slot_S = np.full(len(self.active_S), -1)
        row_of_slot_S[slots_A] = np.arange(len(batch_A))
        return RuleSelection(
            rows_A=rows_of(self.active_S[slots_B], self.device),
            penalties=self._select_penalties(slots_A, batch_A),
            bias=self._select_bias(row_of_slot_S),
            allowed=self._select_allowed(row_of_slot_S),
            minimum=self._select_minimum(row_of_slot_S, batch_A),
            words=self._select_words(row_of_slot_S, slots_A, batch_A),
        )

    def apply(self, logits_BV: Tensor, selection: RuleSelection, num_outputs_B: Tensor) -> Tensor:
        """Adjusted logits of the selected rows, new memory [A, V]."""
        logits_AV = logits_BV[selection.rows_A].clone() if isinstance(selection.rows_A, slice) else logits_BV[selection.rows_A]
        if selection.penalties:
            self._penalise(logits_AV, selection.penalties)
        flat = logits_AV.view(-1)
        if selection.bias:
            flat_E, bias_E = selection.bias
            flat[flat_E] += bias_E
        if selection.allowed:
            flat_E, rows = selection.allowed
            allowed_E = flat[flat_E]
            logits_AV[rows] = -math.inf
            flat[flat_E] = allowed_E
        if selection.words:
            words = selection.words
            prefix_EL = words.prefix_EL
            matched_E = ((self._tail_SL[words.slots_E] == prefix_EL) | (prefix_EL == _ANY_TOKEN)).all(1)
            flat[words.flat_E[matched_E]] = -math.inf
        if selection.minimum:
            flat_E, batch_E, minimum_E = selection.minimum
            flat[flat_E[num_outputs_B[batch_E] < minimum_E]] = -math.inf
        return logits_AV

    def update(self, selection: RuleSelection, tokens_B: Tensor, failed_B: Tensor) -> None:
        """Take in the tokens just sampled; those of failed rows do not count."""
        if selection.penalties:
            tables_P, batch_P = selection.penalties.tables_P, selection.penalties.batch_P
            tokens_P, sampled_P = tokens_B[batch_P], ~failed_B[batch_P]
            new_P = sampled_P & ~self._seen_RV[tables_P, tokens_P]
            self._make_room(int(self._used_R[tables_P].max()) + 1)
            self._touched_RU[tables_P, self._used_R[tables_P]] = tokens_P  # beyond `used`, and so without effect, unless new
            self._used_R[tables_P] += new_P
            self._seen_RV[tables_P, tokens_P] |= sampled_P
            self._counts_RV[tables_P, tokens_P] += sampled_P.int()
        if selection.words and self._tail_SL.shape[1]:
            slots_W, batch_W = selection.words.slots_W, selection.words.batch_W
            tail_WL = self._tail_SL[slots_W]
            longer_WL = torch.cat([tail_WL[:, 1:], tokens_B[batch_W, None]], dim=1)
            self._tail_SL[slots_W] = torch.where(failed_B[batch_W, None], tail_WL, longer_WL)

    def _penalise(self, logits_AV: Tensor, penalties: _Penalties) -> None:
        used_P = self._used_R[penalties.tables_P]
        row_E, place_E = (torch.arange(int(used_P.max()), device=used_P.device) < used_P[:, None]).nonzero(as_tuple=True)
        token_E = self._touched_RU[penalties.tables_P[row_E], place_E]
        at_E = penalties.rows_P[row_E], token_E
        logits_E = logits_AV[at_E]
        if penalties.repetition_P is not None:
            ratio_E = penalties.repetition_P[row_E]
            logits_E = torch.where(logits_E > 0, logits_E / ratio_E, logits_E * ratio_E)
        counts_E = self._counts_RV[penalties.tables_P[row_E], token_E]
        logits_E -= counts_E * penalties.frequency_P[row_E] + (counts_E > 0) * penalties.presence_P[row_E]
        logits_AV[at_E] = logits_E

    def _fill_table(self, slot: int, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        if not self._free_tables:
            self._grow_tables()
        table = self._free_tables.pop()
        self._table_S[slot] = table
        outputs = torch.as_tensor(output_token_ids, dtype=torch.int64)
        self._counts_RV[table] = torch.bincount(outputs, minlength=self.vocab_size).int().to(self.device)
        touched = torch.tensor(sorted({*prompt_token_ids, *output_token_ids}), dtype=torch.int64, device=self.device)
        self._make_room(len(touched))
        self._touched_RU[table, : len(touched)] = touched
        self._used_R[table] = len(touched)
        self._seen_RV[table] = False
        self._seen_RV[table, touched] = True

    def _make_room(self, width: int) -> None:
        if width > (old := self._touched_RU.shape[1]):
            self._touched_RU = torch.nn.functional.pad(self._touched_RU, (0, max(width, 2 * old) - old))

    def _grow_tables(self) -> None:
        """Double the count tables, at most to one per slot."""
        old = len(self._counts_RV)
        new = min(max(2 * old, 8), len(self._table_S))
        for name in ("_counts_RV", "_seen_RV", "_touched_RU", "_used_R"):
            tables = getattr(self, name)
            setattr(self, name, torch.cat([tables, tables.new_zeros(new - old, *tables.shape[1:])]))
        self._free_tables.extend(range(old, new))

    def _add_words(self, slot: int, words: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        old = self._tail_SL.shape[1]
        length = max(old, *(len(word) - 1 for word in words))
        if length > old:
            self._tail_SL = torch.nn.functional.pad(self._tail_SL, (length - old, 0), value=_NO_TOKEN)
            self._words.values_E = np.pad(self._words.values_E, ((0, 0), (length - old, 0)), constant_values=_ANY_TOKEN)
        prefixes = [[_ANY_TOKEN] * (length + 1 - len(word)) + list(word[:-1]) for word in words]
        self._words.add(slot, [word[-1] for word in words], np.reshape(prefixes, (len(words), length)))
        recent = list(output_token_ids[-length:]) if length else []
        self._tail_SL[slot] = torch.tensor([_NO_TOKEN] * (length - len(recent)) + recent, dtype=torch.int64)

    def _select_penalties(self, slots_A: np.ndarray, batch_A: np.ndarray) -> _Penalties | None:
        rows_P = (self._table_S[slots_A] >= 0).nonzero()[0]
        if not len(rows_P):
            return None
        slots_P = slots_A[rows_P]
        values_3P = torch.tensor(self._penalties_S3[slots_P].T, dtype=torch.float32, device=self.device)
        return _Penalties(
            rows_P=self._tensor(rows_P),
            batch_P=self._tensor(batch_A[rows_P]),
            tables_P=self._tensor(self._table_S[slots_P]),
            repetition_P=None if (values_3P[0] == 1.0).all() else values_3P[0],
            presence_P=values_3P[1],
            frequency_P=values_3P[2],
        )

    def _select_bias(self, row_of_slot_S: np.ndarray) -> tuple[Tensor, Tensor] | None:
        if (found := self._bias.select(row_of_slot_S)) is None:
            return None
        return self._flat(found), torch.tensor(found[2], dtype=torch.float32, device=self.device)

    def _select_allowed(self, row_of_slot_S: np.ndarray) -> tuple[Tensor, Tensor] | None:
        if (found := self._allowed.select(row_of_slot_S)) is None:
            return None
        return self._flat(found), self._tensor(np.unique(found[0]))

    def _select_minimum(self, row_of_slot_S: np.ndarray, batch_A: np.ndarray) -> tuple[Tensor, Tensor, Tensor] | None:
        if (found := self._minimum.select(row_of_slot_S)) is None:
            return None
        return self._flat(found), self._tensor(batch_A[found[0]]), self._tensor(found[2])

    def _select_words(self, row_of_slot_S: np.ndarray, slots_A: np.ndarray, batch_A: np.ndarray) -> _Words | None:
        if (found := self._words.select(row_of_slot_S)) is None:
            return None
        rows_W = np.unique(found[0])
        return _Words(
            flat_E=self._flat(found),
            slots_E=self._tensor(slots_A[found[0]]),
            prefix_EL=self._tensor(found[2]),
            slots_W=self._tensor(slots_A[rows_W]),
            batch_W=self._tensor(batch_A[rows_W]),
        )

    def _flat(self, found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Tensor:
        return self._tensor(found[0] * self.vocab_size + found[1])

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)
