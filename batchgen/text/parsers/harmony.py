"""GPT-OSS's messages on channels. In: growing text with its tokens shown. Out: events, the same for any cut of the text.

A message is a header, `<|message|>`, a body, and a token that ends it. The header names the channel (`analysis`: reasoning; `final` and
`commentary`: content) and, after `to=`, whoever the body is for: `functions.f` is a call of the tool f.
"""

import re

from batchgen.text.parsers.events import Call, Content, Event, Reasoning
from batchgen.text.parsers.markers import Markers
from batchgen.text.parsers.values import ToolSchemas, object_text

TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
OPEN_THINK = "<|channel|>analysis<|message|>"
MAX_HEADER_CHARS = 512
"""Text without `<|message|>` that is longer is no header."""

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_MARKERS = Markers(frozenset(["<|message|>", "<|start|>", *_ENDS]))
_BODY_MARKERS = Markers(frozenset(["<|start|>", "<|channel|>", *_ENDS]))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]{1,128})(?![\w.:/-])")


class HarmonyParser:
    """One text's parser. `feed` returns what became certain, `finish` the rest."""

    def __init__(self, schemas: ToolSchemas, thinking_open: bool):
        self._schemas = schemas
        self._text = ""
        self._events: list[Event] = []
        self._in_body = thinking_open
        self._kind: type[Reasoning] | type[Content] = Reasoning if thinking_open else Content
        self._tool: str | None = None
        """Whom the body is for, if it is a call."""
        self._header: list[str] = []
        self._num_header_chars = 0
        self._arguments: list[str] = []
        self._spoken: set[type] = set()
        """Kinds of which there has been text: the next message of the kind begins on a new line."""
        self._at_start = False

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._scan(final=False)
        return self._take()

    def finish(self) -> list[Event]:
        self._scan(final=True)
        if self._in_body:
            self._end_body("")
        self._drop_header()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _scan(self, final: bool) -> None:
        text, at = self._text, 0
        while (found := self._markers.find(text, at)) is not None:
            self._release(text[at : found.start()])
            self._mark(found.group())
            at = found.end()
        until = len(text) - (0 if final else self._markers.num_held(text, at))
        self._release(text[at:until])
        self._text = text[until:]

    @property
    def _markers(self) -> Markers:
        return _BODY_MARKERS if self._in_body else _HEADER_MARKERS

    def _release(self, text: str) -> None:
        """Text without markers."""
        if not text:
            return
        if not self._in_body:
            self._add_to_header(text)
            if self._num_header_chars > MAX_HEADER_CHARS:
                self._say(Content, "".join(self._header))
                self._header = []
        elif self._tool is not None:
            self._arguments.append(text)
        else:
            self._say(self._kind, text)

    def _say(self, kind: type[Reasoning] | type[Content], text: str) -> None:
        if self._at_start and kind in self._spoken:
            text = "\n" + text
        self._at_start = False
        self._spoken.add(kind)
        self._events.append(kind(text))

    def _mark(self, marker: str) -> None:
        if self._in_body:
            self._end_body(marker)
            if marker in ("<|start|>", "<|channel|>"):
                self._add_to_header(marker)
        elif marker == "<|message|>":
            self._open_body()
        elif marker == "<|start|>":
            self._drop_header()
            self._add_to_header(marker)
        else:
            self._drop_header()

    def _add_to_header(self, text: str) -> None:
        self._header.append(text)
        self._num_header_chars += len(text)

    def _drop_header(self) -> None:
        """A header without a message is content."""
        header = "".join(self._header)
        self._header, self._num_header_chars = [], 0
        if header.strip() and header not in ("<|start|>", "<|start|>assistant"):
            self._say(Content, header)

    def _open_body(self) -> None:
        header = "".join(self._header)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient else ""
        self._tool = None
        if name.startswith("functions.") or name in self._schemas:
            self._tool = name.removeprefix("functions.") or None
        self._kind = Reasoning if channel and channel[1] == "analysis" else Content
        self._arguments = []
        self._in_body = self._at_start = True

    def _end_body(self, marker: str) -> None:
        self._in_body = False
        if self._tool is None:
            self._header, self._num_header_chars = [], 0
            return
        body = "".join(self._arguments)
        arguments = object_text(body, marker != "")
        if arguments is not None:
            self._events.append(Call(self._tool, arguments))
        else:
            self._say(Content, "".join(self._header) + "<|message|>" + body + (marker if marker in _ENDS else ""))
        self._tool = None
        self._header, self._num_header_chars = [], 0
