"""Growing text of one sample. In: token ids as they are sampled. Out: text that is certain, and the stop string that ends it.

Cost is linear in the new tokens. The result does not depend on how the ids are cut into pushes.
"""

import codecs
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from batchgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What one push made certain."""

    text: str
    """New text: whole characters, nothing that could still become part of a stop string that will be cut off."""
    stop_match: str | None
    """The stop string that ended the sample."""
    num_tokens: int | None
    """With stop_match: how many of all pushed tokens are kept; the last of them completes the match."""


class TextStream:
    """Decodes incrementally and looks for stop strings.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. It is cut off at the
    character (`include_stop`: kept). One that is complete before token number `min_tokens` is ordinary text. Control tokens are hidden
    but those in `show` (`Tokenizer.control_tokens`), which are text like any other, also to stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        show: Mapping[int, bytes] | None = None,
    ):
        self._pieces = tokenizer.pieces
        self._shown = show or {}
        self._drop_space = tokenizer.drops_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = _automaton(tuple(stop)) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._node = 0
        self._held = ""
        self._parts: list[str] = []
        self._match: TextUpdate | None = None

    @property
    def text(self) -> str:
        """Everything that became certain so far."""
        return "".join(self._parts)

    def push(self, ids: Sequence[int]) -> TextUpdate:
        """Append sampled ids. After a stop match further ids change nothing and the match is reported again."""
        if self._match is not None:
            return self._match
        pieces, shown = self._pieces, self._shown
        if self._stops is None:
            self._num_tokens += len(ids)
            return TextUpdate(self._emit(self._decode(b"".join([pieces[i] or shown.get(i, b"") for i in ids]))), None, None)
        fresh = self._held
        for token_id in ids:
            self._num_tokens += 1
            piece = self._decode(pieces[token_id] or shown.get(token_id, b""))
            if not piece:
                continue
            self._node, end, match = self._stops.scan(self._node, piece, self._num_tokens >= self._min_tokens)
            if match is not None:
                fresh += piece[:end]
                self._match = TextUpdate("", match, self._num_tokens)
                return TextUpdate(self._emit(fresh if self._include_stop else fresh.removesuffix(match)), match, self._num_tokens)
            fresh += piece
        num_held = 0 if self._include_stop else self._stops.num_held[self._node]
        self._held = fresh[len(fresh) - num_held :]
        return TextUpdate(self._emit(fresh[: len(fresh) - num_held]), None, None)

    def finish(self) -> str:
        """No more ids: the rest of the text (an unfinished character becomes U+FFFD). Empty after a stop match."""
        if self._match is not None:
            return ""
        rest, self._held = self._held + self._decode(b"", final=True), ""
        return self._emit(rest)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class _StopAutomaton:
    """Aho-Corasick over the stop strings: a node is the longest suffix of the text that begins some stop string."""

    def __init__(self, stops: tuple[str, ...]):
        self._edges: list[dict[str, int]] = [{}]
        depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            node = 0
            for char in stop:
                if char not in self._edges[node]:
                    self._edges[node][char] = len(self._edges)
                    self._edges.append({})
                    depth.append(depth[node] + 1)
                    self._match.append(None)
                node = self._edges[node][char]
            self._match[node] = stop
        self._fail = [0] * len(depth)
        self.num_held = [0] * len(depth)
        """Per node: trailing characters of the text that could still become a stop string."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            fail = self._fail[node]
            self._match[node] = self._match[node] or self._match[fail]
            self.num_held[node] = depth[node] if self._edges[node] else self.num_held[fail]
            for char, child in self._edges[node].items():
                self._fail[child] = self._step(fail, char)
                queue.append(child)
        self._first = re.compile("|".join(re.escape(char) for char in self._edges[0]))

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._edges[node]:
            node = self._fail[node]
        return self._edges[node].get(char, 0)

    def scan(self, node: int, text: str, allowed: bool) -> tuple[int, int, str | None]:
        """(node after text, its length, None), or (node, end, stop string) of the first match if matches are allowed; end is in text."""
        at = 0
        while at < len(text):
            if not node:
                begin = self._first.search(text, at)
                if begin is None:
                    break
                at = begin.start()
            node = self._step(node, text[at])
            at += 1
            if allowed and self._match[node] is not None:
                return node, at, self._match[node]
        return node, len(text), None


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _StopAutomaton:
    return _StopAutomaton(stops)
