"""Tokens guessed from what was seen before, checked by the model in one pass. In: sequences. Out: drafts, and whether they pay.

A sequence's last tokens are looked up in its prompt, in its own output and in the other samples of its request; what followed them there
is the draft. Every position's random number depends on the sequence's seed and the position alone, so the model samples what it would have
sampled anyway, and a draft is accepted as far as it is the same: results do not change.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from batchgen.sequence import Sequence

SIZES = (4, 3, 2)
"""Tokens that are looked up, the most first."""
MOST_LIVE = 32
"""With more sequences than that each pass is full enough."""
TRY_AGAIN = 16
"""Visits after which the slower way is tried again."""
WEIGHT = 0.3
"""Of the newest measurement in a mean."""


@dataclass(slots=True)
class _Text:
    """A sequence's prompt and output, as far as it is indexed."""

    tokens: list[int]
    num_indexed: int = 0


@dataclass(slots=True)
class _Group:
    """Where each run of tokens was seen last, in any sample of a request: the text, and the place of what came next."""

    seen: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    texts: dict[int, _Text] = field(default_factory=dict)
    """By sample."""


@dataclass(slots=True)
class _Pace:
    """Seconds per token of one way to decode."""

    mean: float | None = None

    def note(self, seconds: float) -> None:
        self.mean = seconds if self.mean is None else WEIGHT * seconds + (1 - WEIGHT) * self.mean


class Speculation:
    """Drafts of up to `num_tokens` tokens while few sequences are live, as long as they are worth their passes."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._groups: dict[str, _Group] = {}
        self._paces = {True: _Pace(), False: _Pace()}
        self._since_other = 0

    def drafts(self, seqs: Seq[Sequence]) -> list[list[int]] | None:
        """A draft, maybe empty, for each sequence that may generate more than one token; None if plain decoding is better now."""
        if not self.num_tokens or not seqs or len(seqs) > MOST_LIVE or not self._preferred():
            return None
        drafts = [self._draft(seq)[: seq.max_outputs - len(seq.output_ids) - 1] for seq in seqs]
        return drafts if any(drafts) else None

    def note(self, speculated: bool, num_tokens: int, seconds: float) -> None:
        """A visit gave so many tokens. With many sequences live it says nothing about few."""
        if num_tokens:
            self._paces[speculated].note(seconds / num_tokens)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._groups.pop(request_id, None)

    def learn(self, seq: Sequence) -> None:
        """Take in what a sequence has generated, for its group, if the request has more than one sample."""
        if self.num_tokens and seq.request.params.n > 1:
            self._read(seq)

    def _preferred(self) -> bool:
        """Whether drafts are the faster way, or not yet known not to be."""
        plain, speculative = self._paces[False].mean, self._paces[True].mean
        faster = plain is None or speculative is None or speculative < plain
        self._since_other += 1
        if self._since_other >= TRY_AGAIN:
            self._since_other = 0
            return not faster
        return faster

    def _draft(self, seq: Sequence) -> list[int]:
        group, tokens = self._read(seq)
        for size in SIZES:
            found = group.seen.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if found is not None:
                source, place = found
                return source[place : place + self.num_tokens]
        return []

    def _read(self, seq: Sequence) -> tuple[_Group, list[int]]:
        """Index what is new; the sequence's group and its text."""
        group = self._groups.setdefault(seq.request.request_id, _Group())
        text = group.texts.get(seq.index)
        if text is None:
            text = group.texts[seq.index] = _Text(list(seq.request.prompt_token_ids))
        num_prompt = len(seq.request.prompt_token_ids)
        text.tokens += seq.output_ids[len(text.tokens) - num_prompt :]
        for place in range(text.num_indexed, len(text.tokens)):
            for size in SIZES:
                if place >= size:
                    group.seen[tuple(text.tokens[place - size : place])] = text.tokens, place
        text.num_indexed = len(text.tokens)
        return group, text.tokens
