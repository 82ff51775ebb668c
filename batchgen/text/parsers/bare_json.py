"""Llama 3's calls, which no tag surrounds: the answer itself is the call's JSON. In: growing text. Out: events, the same for any cut of it.

An answer that begins with a JSON object, or the tag that may stand before one, is held to its end: objects at its start that are calls are
calls, what follows them is content. Without tools in the request nothing is a call.
"""

import json

from batchgen.text.parsers.events import Content, Event
from batchgen.text.parsers.syntax import bare_call
from batchgen.text.parsers.tagged import TagFormat, TagParser
from batchgen.text.parsers.values import ToolSchemas, read_json

TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;"


class BareJsonParser:
    """One text's parser. `form` reads what stands before the answer: the reasoning."""

    def __init__(self, form: TagFormat, schemas: ToolSchemas, thinking_open: bool):
        self._inner = TagParser(form, schemas, thinking_open)
        self._parts: list[str] | None = [] if schemas else None
        """The answer so far, while it may be calls; None once it is text."""
        self._start = ""
        """How the answer begins, white space aside, as far as that decides."""

    def feed(self, text: str) -> list[Event]:
        return self._hold(self._inner.feed(text))

    def finish(self) -> list[Event]:
        events = self._hold(self._inner.finish())
        answer, self._parts = "".join(self._parts or []), None
        if not answer:
            return events
        return events + _read(answer)

    def _hold(self, events: list[Event]) -> list[Event]:
        certain: list[Event] = []
        for event in events:
            if self._parts is None or not isinstance(event, Content):
                certain.append(event)
                continue
            self._parts.append(event.text)
            if len(self._start) < len(TAG):
                self._start = (self._start + event.text).lstrip()[: len(TAG)]
            if not self._start.startswith("{") and not TAG.startswith(self._start):
                certain.append(Content("".join(self._parts)))
                self._parts = None
        return certain


def _read(answer: str) -> list[Event]:
    """The calls that the answer begins with, and the rest."""
    decoder, events, at, rest = json.JSONDecoder(strict=False), list[Event](), 0, 0
    while at < len(answer):
        if answer[at] in _BETWEEN:
            at += 1
            continue
        if answer.startswith(TAG, at):
            at += len(TAG)
            continue
        try:
            _, end = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            break
        call = bare_call(read_json(answer[at:end]))
        if call is None:
            break
        events.append(call)
        at = rest = end
    if not events:
        return [Content(answer)]
    left = answer[rest:].strip(_BETWEEN)
    return [*events, Content(left)] if left else events
