"""How the samples of one prompt are read as messages. In: a tokenizer, a prompt's ids, its tools. Out: Reply per sample.

Nothing is parsed here: `Sample.message` does that when it is asked for.
"""

import codecs
from typing import Any

from batchgen.outputs import Reply, Sample
from batchgen.text.control import PROMPT_TAIL, marker_tokens, opens_thinking


class Replies:
    """One prompt's. A tokenizer of another kind than ours (no `message_format`), or none, gives samples without messages."""

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], tools: list[dict[str, Any]] | None = None):
        self.format: str | None = getattr(tokenizer, "message_format", None)
        self._tokenizer, self._prompt, self._tools = tokenizer, prompt_token_ids, tools
        self._shown: dict[int, bytes] = {}
        self._thinking_open: bool | None = None
        if self.format is not None:
            self._shown = tokenizer.control_tokens(marker_tokens(self.format))

    @property
    def thinking_open(self) -> bool:
        """Whether the prompt ends inside the reasoning."""
        if self._thinking_open is None:
            tail = self._tokenizer.decode(self._prompt[-PROMPT_TAIL:], show=self._shown) if self.format else ""
            self._thinking_open = self.format is not None and opens_thinking(self.format, tail)
        return self._thinking_open

    def attach(self, sample: Sample) -> None:
        """Give the sample what its message is read from."""
        if self.format is not None and sample.error is None:
            sample.reply = Reply(format=self.format, tools=self._tools, thinking_open=self.thinking_open, text=self.marked_text(sample))

    def marked_text(self, sample: Sample) -> str | None:
        """The sample's text with the format's markers, cut where the text is; None where the text hides none."""
        if self._shown.keys().isdisjoint(sample.token_ids):
            return None
        if sample.text.startswith(self._tokenizer.decode(sample.token_ids)):
            return str(self._tokenizer.decode(sample.token_ids, show=self._shown))
        return self._marked_until(sample.token_ids, len(sample.text))

    def _marked_until(self, token_ids: list[int], num_chars: int) -> str:
        pieces, drop_space = self._tokenizer.pieces, self._tokenizer.drops_leading_space
        utf8, parts = codecs.getincrementaldecoder("utf-8")("replace"), list[str]()
        for token_id in token_ids:
            if num_chars <= 0:
                break
            text = utf8.decode(pieces[token_id])
            if text and drop_space:
                drop_space, text = False, text.removeprefix(" ")
            parts.append(text[:num_chars] if pieces[token_id] else self._shown.get(token_id, b"").decode())
            num_chars -= len(text)
        return "".join(parts)
