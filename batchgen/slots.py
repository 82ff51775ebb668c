"""What rows of decode steps need, in arrays indexed by slot on the device. In: sequences, sampled tokens. Out: batches. Decodes nothing.

One slot more than there are sequences, the spare one, stands in for rows whose sequence has ended and for padding: it writes to the KV
cache's spare page and never ends, so a step needs no row count from the device.

Shapes: S slots, B rows, P pages, K stop ids.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from batchgen.kv_cache import KVCache
from batchgen.packing import PackedBatch
from batchgen.sequence import Sequence


class Slots:
    """State of the sequences that are decoding."""

    def __init__(self, num_slots: int, max_pages: int, kv: KVCache):
        self.page_size, self.device = kv.page_size, kv.device
        self.spare, spare_page = num_slots, kv.spare_page
        self.free = list(range(num_slots - 1, -1, -1))
        size = num_slots + 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        self.last_token_S, self.num_tokens_S = ints(size), ints(size)
        self.num_outputs_S, self.max_outputs_S = ints(size), ints(size)
        self.page_table_SP, self.stop_ids_SK = ints(size, max_pages), ints(size, 1) - 1
        self.ended_S = torch.zeros(size, dtype=torch.bool, device=self.device)
        self.num_tokens_S[self.spare], self.ended_S[self.spare] = 1, True
        self.page_table_SP[self.spare] = spare_page
        self.places_S = ints(size).fill_(kv.spare_state) if kv.num_states else None

    def fill(self, seqs: Seq[Sequence]) -> None:
        """Write the state of sequences that have just been given slots."""
        if not seqs:
            return
        stops = [sorted(seq.stop_token_ids) for seq in seqs]
        if (lacking := max(map(len, stops)) - self.stop_ids_SK.shape[1]) > 0:
            self.stop_ids_SK = torch.nn.functional.pad(self.stop_ids_SK, (0, lacking), value=-1)
        index_B = self._tensor([seq.slot for seq in seqs])
        for array_S, values in (
            (self.last_token_S, [seq.output_ids[-1] if seq.output_ids else 0 for seq in seqs]),
            (self.num_tokens_S, [seq.num_tokens for seq in seqs]),
            (self.num_outputs_S, [len(seq.output_ids) for seq in seqs]),
            (self.max_outputs_S, [seq.max_outputs for seq in seqs]),
        ):
            array_S[index_B] = self._tensor(values)
        if self.places_S is not None:
            self.places_S[index_B] = self._tensor([seq.place for seq in seqs])
        self.ended_S[index_B] = False
        self.stop_ids_SK[index_B] = self._table(stops, self.stop_ids_SK.shape[1], -1)
        pages_BP = self._table([seq.pages for seq in seqs], max(len(seq.pages) for seq in seqs), 0)
        self.page_table_SP[index_B, : pages_BP.shape[1]] = pages_BP

    def extend_pages(self, grown: list[tuple[Sequence, list[int]]]) -> None:
        """Append new pages to sequences' page tables, in one write."""
        rows, columns, pages = [], [], []
        for seq, new in grown:
            for page in new:
                rows.append(seq.slot)
                columns.append(len(seq.pages))
                pages.append(page)
                seq.pages.append(page)
        if pages:
            index = self._tensor([rows, columns])
            self.page_table_SP[index[0], index[1]] = self._tensor(pages)

    def live(self, slots_B: Tensor) -> Tensor:
        """The slots, with the spare one in place of those whose sequence has ended."""
        return torch.where(self.ended_S[slots_B], self.spare, slots_B)

    def decode_batch(self, live_B: Tensor, width: int) -> PackedBatch:
        """One token of each row, whose page tables are at most `width` pages long."""
        num_rows, size = len(live_B), self.page_size
        num_tokens_B = self.num_tokens_S[live_B]
        positions_B = num_tokens_B - 1
        tables_BP = self.page_table_SP[live_B, :width]
        page_B = tables_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        return PackedBatch(
            input_ids_T=self.last_token_S[live_B],
            positions_T=positions_B,
            kv_slots_T=page_B * size + positions_B % size,
            query_starts=list(range(num_rows + 1)),
            num_decode=num_rows,
            context_lens_B=num_tokens_B,
            page_table_BP=tables_BP,
            logit_index_M=torch.arange(num_rows, device=self.device),
            prefill_contexts=[],
            state_B=None if self.places_S is None else self.places_S[live_B],
            return_routed=False,
        )

    def advance(self, live_B: Tensor, tokens_B: Tensor, failed_B: Tensor) -> None:
        """Take in a sampled token per row; rows that reached a stop id, their limit or a fault have ended."""
        num_outputs_B = self.num_outputs_S[live_B] + 1
        ended_B = (self.stop_ids_SK[live_B] == tokens_B[:, None]).any(1) | failed_B
        ended_B |= (num_outputs_B >= self.max_outputs_S[live_B]) | (live_B == self.spare)
        self.num_outputs_S[live_B] = num_outputs_B
        self.num_tokens_S[live_B] += (live_B != self.spare).long()
        self.last_token_S[live_B] = tokens_B
        self.ended_S[live_B] = ended_B

    def _table(self, rows: Seq[Seq[int]], width: int, fill: int) -> Tensor:
        table = np.full((len(rows), width), fill, np.int64)
        for row, values in zip(table, rows, strict=True):
            row[: len(values)] = values
        return self._tensor(table)

    def _tensor(self, values: np.ndarray | Seq[int] | Seq[Seq[int]]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self.device, non_blocking=True)
