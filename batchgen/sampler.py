"""Sample tokens. In: logits of a batch and the slots its rows belong to. Out: token ids with logprobs. Knows no sequences.

A row's result is a function of its logits, its slot's parameters, its seed and its output position; never of the other rows.

Shapes: S slots, B rows, V vocabulary, K most likely tokens, R rows that draw from ranked tokens, Q rows whose logprobs need more
than the probability they were drawn with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.draw import FIRST_PREFIX, Filters, draw, draw_ranked, greedy, ranked
from batchgen.errors import RequestError
from batchgen.logprobs import LOWEST_TEMPERATURE, log_normalizer, logprobs_of
from batchgen.outputs import LogprobsMode
from batchgen.penalties import LogitRules, Rows, RuleSelection, rows_of
from batchgen.rng import SlotUniforms
from batchgen.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """One token per row."""

    token_ids_B: Tensor
    """int64; 0 for failed rows."""
    logprobs_B: Tensor
    """float32, in the row's logprobs_mode, always finite; 0 for failed rows."""
    top_ids_BK: Tensor | None
    """int64, most likely first; row b asked for the first `logprobs` of them. None when no row asked."""
    top_logprobs_BK: Tensor | None
    """float32, finite for rows that have not failed."""
    failed_B: Tensor
    """bool: no token could be sampled."""
    blocked_B: Tensor
    """bool: those of the failed rows whose logits were fine but whose masks left no token; the others had NaN or +inf logits."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "SampledTokens":
        """With the function of every tensor."""
        return SampledTokens(
            token_ids_B=function(self.token_ids_B),
            logprobs_B=function(self.logprobs_B),
            top_ids_BK=None if self.top_ids_BK is None else function(self.top_ids_BK),
            top_logprobs_BK=None if self.top_logprobs_BK is None else function(self.top_logprobs_BK),
            failed_B=function(self.failed_B),
            blocked_B=function(self.blocked_B),
        )

    def first(self, num_rows: int) -> "SampledTokens":
        """A copy of the first rows."""
        return self.mapped(lambda tensor: tensor[:num_rows].clone())


@dataclass(slots=True, kw_only=True)
class _Selection:
    """Everything about one choice of slots that does not change from step to step. None: no row needs it."""

    slots: np.ndarray
    slots_B: Tensor
    plain: bool
    """Every row draws from all tokens, or takes the likeliest, and reports that token's logprob alone."""
    temperature_B1: Tensor | None
    rules: RuleSelection | None
    any_plain: bool
    """Some rows draw from all tokens, or all that min_p leaves."""
    min_p_B1: Tensor | None
    greedy_rows: Rows | None
    ranked_rows: Rows | None
    filters: Filters
    prefix: int
    reported_rows: Rows | None
    all_raw: bool
    raw_Q1: Tensor | None
    """Which reported rows are raw, where they differ."""
    num_top: int


class Sampler:
    """Parameters and state of `num_slots` sequences, and the sampling of any batch of them."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device | str = "cpu"):
        self.vocab_size = vocab_size
        self.device = device
        self.rules = LogitRules(vocab_size, num_slots, device)
        self._uniforms = SlotUniforms(num_slots + 1, device)
        self._divisor_S = torch.zeros(num_slots + 1, dtype=torch.float32, device=device)
        """Temperatures on the device, 0 for greedy rows. One slot more than are given out, for rows that stand for none."""
        self._temperature_S = np.ones(num_slots)
        self._top_k_S = np.full(num_slots, vocab_size)
        self._top_p_S = np.ones(num_slots)
        self._min_p_S = np.zeros(num_slots)
        self._raw_S = np.zeros(num_slots, bool)
        self._num_top_S = np.zeros(num_slots, np.int64)
        self._selection: _Selection | None = None

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        bad_word_ids: Sequence[Sequence[int]],
    ) -> None:
        """Give a slot to a sequence, on admission or when it resumes with the output it already has."""
        self._uniforms.set_slot(slot, seed)
        self._temperature_S[slot] = params.temperature
        self._top_k_S[slot] = min(params.top_k or self.vocab_size, self.vocab_size)
        self._top_p_S[slot] = params.top_p
        self._min_p_S[slot] = params.min_p
        self._raw_S[slot] = params.logprobs_mode == "raw"
        self._num_top_S[slot] = min(params.logprobs, self.vocab_size)
        self.rules.set_slot(slot, params, prompt_token_ids, output_token_ids, eos_token_ids, bad_word_ids)
        self._selection = None

    def clear_slot(self, slot: int) -> None:
        """Forget the slot's sequence."""
        self.rules.clear_slot(slot)
        self._selection = None

    def is_plain(self, slots: Sequence[int] | np.ndarray) -> bool:
        """Whether `sample_plain` can sample these rows; call it before, for it also brings the device's arrays up to date."""
        self._uniforms.seeds()
        return self._select(np.asarray(slots)).plain

    def sample_plain(self, logits_BV: Tensor, slots_B: Tensor, num_outputs_B: Tensor) -> SampledTokens:
        """`sample` on a GPU for rows that `is_plain`, without a look at the host; any float type. Slots may be the one beyond the last."""
        from batchgen.kernels.sampling import draw_plain

        tokens_B, logprobs_B, failed_B = draw_plain(logits_BV, slots_B, self._divisor_S, self._uniforms.seeds(), num_outputs_B)
        return SampledTokens(
            token_ids_B=tokens_B,
            logprobs_B=logprobs_B,
            top_ids_BK=None,
            top_logprobs_BK=None,
            failed_B=failed_B,
            blocked_B=torch.zeros_like(failed_B),
        )

    def sample(self, logits_BV: Tensor, slots: Sequence[int] | np.ndarray | Tensor, num_outputs_B: Tensor) -> SampledTokens:
        """One token per row, and penalties and bad words brought up to date with it.

        logits_BV: left as it is. slots: on the host, all different. num_outputs_B: int64, tokens each sequence already has.
        """
        assert logits_BV.shape[1] == self.vocab_size
        logits_BV = logits_BV.float()
        s = self._select(np.asarray(slots))
        slots_B = s.slots_B
        scaled_BV = logits_BV if s.temperature_B1 is None else logits_BV / s.temperature_B1
        wanted_BV = scaled_BV
        if s.rules is not None:
            adjusted_AV = self.rules.apply(logits_BV, s.rules, num_outputs_B)
            if s.temperature_B1 is not None:
                adjusted_AV /= s.temperature_B1[s.rules.rows_A]
            wanted_BV = _replaced(scaled_BV, s.rules.rows_A, adjusted_AV)
        probs_BV = wanted_BV.softmax(1)
        tokens_B = self._choose(s, slots_B, wanted_BV, probs_BV, num_outputs_B)
        prob_B = probs_BV.gather(1, tokens_B[:, None]).squeeze(1)
        logprobs_B = prob_B.double().log().float()
        bad_B = failed_B = prob_B.isnan()
        top_ids_BK = top_logprobs_BK = None
        if s.reported_rows is not None:
            rows = s.reported_rows
            reported_QV = (logits_BV if s.all_raw else scaled_BV)[rows]
            if s.raw_Q1 is not None:
                reported_QV = torch.where(s.raw_Q1, logits_BV[rows], reported_QV)
            normalizer_Q = log_normalizer(reported_QV)
            logprobs_B[rows] = logprobs_of(reported_QV, tokens_B[rows], normalizer_Q)
            bad_B = _replaced(failed_B, rows, normalizer_Q.isnan())
            failed_B = failed_B | bad_B
            if s.num_top:
                top_ids_QK = ranked(reported_QV, s.num_top)
                top_ids_BK = _replaced(tokens_B.new_zeros(len(tokens_B), s.num_top), rows, top_ids_QK)
                top_logprobs_QK = logprobs_of(reported_QV, top_ids_QK, normalizer_Q)
                top_logprobs_BK = _replaced(logprobs_B.new_zeros(top_ids_BK.shape), rows, top_logprobs_QK)
        tokens_B = tokens_B.masked_fill(failed_B, 0)
        if s.rules is not None:
            self.rules.update(s.rules, tokens_B, failed_B)
        return SampledTokens(
            token_ids_B=tokens_B,
            logprobs_B=logprobs_B.masked_fill(failed_B, 0.0),
            top_ids_BK=top_ids_BK,
            top_logprobs_BK=top_logprobs_BK,
            failed_B=failed_B,
            blocked_B=failed_B & ~bad_B,
        )

    def _choose(self, s: _Selection, slots_B: Tensor, logits_BV: Tensor, probs_BV: Tensor, num_outputs_B: Tensor) -> Tensor:
        if s.greedy_rows == slice(None):
            return greedy(logits_BV)
        uniform_B = self._uniforms.at(slots_B, num_outputs_B)
        if s.any_plain:
            likely_BV = probs_BV
            if s.min_p_B1 is not None:
                likely_BV = torch.where(probs_BV >= s.min_p_B1 * probs_BV.amax(1, keepdim=True), probs_BV, 0.0)
            tokens_B = draw(likely_BV, uniform_B)
        else:
            tokens_B = torch.empty_like(num_outputs_B)
        if (rows := s.ranked_rows) is not None:
            tokens_B[rows] = draw_ranked(logits_BV[rows], probs_BV[rows], uniform_B[rows], s.filters, s.prefix)
        if (rows := s.greedy_rows) is not None:
            tokens_B[rows] = greedy(logits_BV[rows])
        return tokens_B

    def _select(self, slots: np.ndarray) -> _Selection:
        """Gather parameters by row; kept while the same slots come with the same parameters."""
        if self._selection is not None and np.array_equal(self._selection.slots, slots):
            return self._selection
        temperature = self._temperature_S[slots]
        is_greedy = temperature == 0.0
        divisor = np.where(is_greedy, 1.0, np.maximum(temperature, LOWEST_TEMPERATURE))
        top_k, top_p, min_p = self._top_k_S[slots], self._top_p_S[slots], self._min_p_S[slots]
        has_top_k = top_k < self.vocab_size
        is_ranked = ~is_greedy & (has_top_k | (top_p < 1.0))
        only_top_p = is_ranked & ~has_top_k
        only_min_p = np.where(is_greedy | is_ranked, 0.0, min_p)
        raw, num_top = self._raw_S[slots], self._num_top_S[slots]
        reported = self.rules.active_S[slots] | (num_top > 0) | (raw & (divisor != 1.0))
        raw_Q = raw[reported]
        rules = self.rules.select(slots)
        if self._divisor_S.is_cuda:
            temperatures = np.where(self._temperature_S == 0.0, 0.0, np.maximum(self._temperature_S, LOWEST_TEMPERATURE))
            self._divisor_S[:-1] = torch.from_numpy(temperatures.astype(np.float32))
        self._selection = _Selection(
            slots=slots.copy(),
            slots_B=torch.from_numpy(slots.astype(np.int64)).to(self.device),
            plain=rules is None and not reported.any() and not is_ranked.any() and not only_min_p.any(),
            temperature_B1=self._column(divisor) if (divisor != 1.0).any() else None,
            rules=rules,
            any_plain=not (is_greedy | is_ranked).all(),
            min_p_B1=self._column(only_min_p) if only_min_p.any() else None,
            greedy_rows=rows_of(is_greedy, self.device) if is_greedy.any() else None,
            ranked_rows=rows_of(is_ranked, self.device) if is_ranked.any() else None,
            filters=Filters(
                top_k_R=torch.from_numpy(top_k[is_ranked]).to(self.device),
                top_p_R=torch.from_numpy(top_p[is_ranked]).to(self.device),
                min_p_R=torch.from_numpy(min_p[is_ranked]).to(self.device),
            ),
            prefix=int(max(top_k[is_ranked & has_top_k].max(initial=1), FIRST_PREFIX if only_top_p.any() else 1)),
            reported_rows=rows_of(reported, self.device) if reported.any() else None,
            all_raw=bool(raw_Q.all()),
            raw_Q1=torch.from_numpy(raw_Q[:, None]).to(self.device) if raw_Q.any() and not raw_Q.all() else None,
            num_top=int(num_top.max(initial=0)),
        )
        return self._selection

    def _column(self, values_B: np.ndarray) -> Tensor:
        return torch.tensor(values_B[:, None], dtype=torch.float32, device=self.device)


def _replaced(x_B: Tensor, rows: Rows, values: Tensor) -> Tensor:
    """x_B with `rows` set to values, in new memory."""
    return values if isinstance(rows, slice) else x_B.index_copy(0, rows, values)


def prompt_logprobs(logits_MV: Tensor, targets_M: Tensor, k: int, temperature: float, mode: LogprobsMode) -> tuple[Tensor, Tensor, Tensor]:
    """Score given tokens: (logprob_M, top_ids_MK, top_logprobs_MK), K = min(k, V), most likely first.

    Rows with NaN or +inf logits give NaN logprobs.
    """
    logits_MV = logits_MV.float()
    if mode == "processed" and temperature != 0.0:
        logits_MV = logits_MV / max(temperature, LOWEST_TEMPERATURE)
    normalizer_M = log_normalizer(logits_MV)
    top_ids_MK = ranked(logits_MV, min(k, logits_MV.shape[1]))
    return (
        logprobs_of(logits_MV, targets_M, normalizer_M),
        top_ids_MK,
        logprobs_of(logits_MV, top_ids_MK, normalizer_M),
    )


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens outside the vocabulary. RequestError: `logit_bias_out_of_range` or `token_id_out_of_range`."""
    fields: list[tuple[str, str, Sequence[int]]] = [
        ("logit_bias", "logit_bias_out_of_range", list(params.logit_bias or ())),
        ("allowed_token_ids", "token_id_out_of_range", params.allowed_token_ids or ()),
        ("stop_token_ids", "token_id_out_of_range", params.stop_token_ids or ()),
    ]
    for name, code, ids in fields:
        if ids and max(ids) >= vocab_size:
            raise RequestError(f"{name} names token {max(ids)}, the vocabulary has ids 0 to {vocab_size - 1}; leave it out", code=code)
