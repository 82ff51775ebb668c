"""One forward pass as tensors. In: nothing. Out: PackedBatch, the only thing a model sees of the scheduler. Never touches weights or KV."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class SharedPrefix:
    """Runs of consecutive decode rows whose first keys lie in the same pages, such as the samples of one prompt. int64.

    N runs, which may hold no row (count 0).
    """

    first_N: Tensor
    """First row of the run."""
    count_N: Tensor
    num_keys_N: Tensor
    """Keys that all its rows share: whole pages."""
    slot_N: Tensor
    """Row of `page_table_SP` with those pages."""
    page_table_SP: Tensor
    num_keys_B: Tensor
    """The same number by decode row; 0 for rows in no run."""


@dataclass(slots=True, kw_only=True)
class Spans:
    """Which tokens belong to which sequence's state."""

    starts: list[int]
    """B + 1 offsets into T."""
    start_B: Tensor
    """The same, int64."""
    state_B: Tensor
    """int64, place of the sequence among the states."""
    fresh_B: Tensor
    """int64, 1 where the span begins with the sequence's first token: what lies in that place is another's; else 0."""


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """A ragged batch without padding: the decode rows first, then the prefill chunks.

    T tokens, B rows (sequences), P pages of the longest row, M tokens whose logits are wanted.
    """

    input_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, position of each token in its sequence."""
    kv_slots_T: Tensor
    """int64, page * page_size + offset: where this token's KV is written."""
    query_starts: list[int]
    """B + 1 offsets into T; row b owns tokens query_starts[b]:query_starts[b + 1]."""
    num_decode: int
    """The first num_decode rows have exactly one token each."""
    context_lens_B: Tensor
    """int64, keys visible to the row's last token, this step's included."""
    page_table_BP: Tensor
    """int64, padded with 0."""
    logit_index_M: Tensor
    """int64 indices into T."""
    prefill_contexts: list[int]
    """`context_lens_B` of the rows behind the first num_decode, for plans made on the host."""
    state_B: Tensor | None = None
    """int64, place of each row's state; None in models that keep none."""
    shared: SharedPrefix | None = None
    """A backend may use it to read such keys once; results are the same without."""
    return_routed: bool = False
    """Also return the experts that the router chose."""

    def rows(self) -> Tensor:
        """int64 [T], row of each token."""
        lens = torch.tensor(self.query_starts, device=self.positions_T.device).diff()
        return torch.arange(len(lens), device=lens.device).repeat_interleave(lens)

    def spans(self) -> Spans:
        """Rows as spans of tokens that each carry a state on."""
        assert self.state_B is not None
        device, num_rows = self.context_lens_B.device, len(self.query_starts) - 1
        only_decode = self.num_decode == num_rows  # then nothing comes from the host
        start_B = torch.arange(num_rows + 1, device=device) if only_decode else torch.tensor(self.query_starts, device=device)
        return Spans(
            starts=self.query_starts, start_B=start_B, state_B=self.state_B, fresh_B=(self.context_lens_B == start_B.diff()).long()
        )
