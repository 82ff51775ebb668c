"""Formats in which tags surround reasoning and calls. In: a format's tags and growing text. Out: events, the same for any cut of the text.

Work is linear in the text. What does not parse is content, exactly as written.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from batchgen.text.parsers.events import Call, Content, Event, Reasoning
from batchgen.text.parsers.markers import Markers
from batchgen.text.parsers.syntax import Reader
from batchgen.text.parsers.values import ToolSchemas

MAX_RESCANS = 16
"""How often a call that swallowed its own end is cut at that end and the rest read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Part of a call in which its closing marker is a value's text."""

    open: str
    close: str
    escapes: tuple[str, ...] = ()
    """Inside, these are not `close` though they contain it."""


JSON_STRING = Guard(open='"', close='"', escapes=('\\"', "\\\\"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TagFormat:
    """The tags of one family. No tag is the beginning of another."""

    tokens: tuple[str, ...]
    """Tokens of which the tags are made, those that a tokenizer may hide."""
    think: tuple[str, str] = ("<think>", "</think>")
    """Around the reasoning, at the start of a message."""
    think_ends: tuple[str, ...] = ()
    """Tags that end the reasoning though its closing tag is missing. Other calls inside reasoning count only if it never closes."""
    sections: tuple[tuple[str, str], ...] = ()
    """Around one or more calls; may be missing."""
    call: tuple[str, str] | None = None
    """Around one call."""
    guard: Guard = JSON_STRING
    read: Reader | None = None
    dropped: tuple[str, ...] = ()
    """Tags around content that add nothing."""
    short_ids: bool = False
    """The family's templates take only ids of nine letters and digits."""
    exact: bool = False
    """White space at the edges of reasoning and content is the model's own, not the template's."""

    @property
    def openings(self) -> frozenset[str]:
        """Tags that open a section or a call."""
        return frozenset([*(tags[0] for tags in self.sections), *(self.call[:1] if self.call else ())])


class _State(Enum):
    THINK = auto()
    HELD = auto()
    """Inside reasoning that speaks of a call, or ends in one: its end decides."""
    TEXT = auto()
    CALL = auto()
    VALUE = auto()
    """Inside a call's guarded part."""


class TagParser:
    """One text's parser. `feed` returns what became certain, `finish` the rest."""

    def __init__(self, form: TagFormat, schemas: ToolSchemas, thinking_open: bool):
        self._form = form
        self._schemas = schemas
        self._state = _State.THINK if thinking_open else _State.TEXT
        self._sets = _marker_sets(form)
        self._text = ""
        self._events: list[Event] = []
        self._fresh = True
        """Nothing but white space so far, apart from the tag that opens the reasoning."""
        self._parts: list[str] = []
        """The call, or the reasoning held back, so far."""
        self._num_chars = 0
        self._first_end: tuple[int, str] | None = None
        """Where in the call a marker would have ended it, had it not been a value's text."""
        self._section_end: str | None = None
        self._section_has_call = False
        self._in_markup = False
        """Whether white space belongs to the section's tags: it follows one, or a call."""
        self._pending: list[str] = []
        """An opened section, until a call shows that it is one, and white space after tags."""
        self._rescans_left = MAX_RESCANS

    def feed(self, text: str) -> list[Event]:
        self._text += text
        self._scan(final=False)
        return self._take()

    def finish(self) -> list[Event]:
        self._scan(final=True)
        while self._state in (_State.CALL, _State.VALUE) and self._first_end is not None and self._rescans_left:
            self._rescans_left -= 1
            at, marker = self._first_end
            body = "".join(self._parts)
            self._text = body[at + len(marker) :]
            self._end_call_at(marker, body[:at])
            self._scan(final=True)
        if self._state in (_State.CALL, _State.VALUE):
            self._end_call("".join(self._parts), None)
        if self._state is _State.HELD:
            self._end_held()
        if not self._section_has_call:
            self._flush_pending()
        self._pending.clear()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _scan(self, final: bool) -> None:
        text, at = self._text, 0
        while (found := self._sets[self._state].find(text, at)) is not None:
            self._release(text[at : found.start()])
            self._mark(found.group())
            at = found.end()
        until = len(text) - (0 if final else self._sets[self._state].num_held(text, at))
        self._release(text[at:until])
        self._text = text[until:]

    def _release(self, text: str) -> None:
        """Text without markers."""
        if not text:
            return
        blank = not text.strip()
        if self._state in (_State.CALL, _State.VALUE, _State.HELD):
            self._parts.append(text)
            self._num_chars += len(text)
        elif self._state is _State.THINK:
            self._fresh &= blank
            self._events.append(Reasoning(text))
        elif blank and self._in_markup:
            self._pending.append(text)
        else:
            self._fresh &= blank
            self._flush_pending()
            self._in_markup = False
            if not self._section_has_call:
                self._section_end = None
            self._events.append(Content(text))

    def _flush_pending(self) -> None:
        if self._pending:
            self._events.append(Content("".join(self._pending)))
            self._pending.clear()

    def _mark(self, marker: str) -> None:
        if self._state is _State.THINK:
            self._mark_thinking(marker)
        elif self._state is _State.HELD:
            self._events.append(Reasoning("".join(self._parts)))
            self._state = _State.TEXT
            self._fresh = False
        elif self._state is _State.TEXT:
            self._mark_text(marker)
        elif self._state is _State.CALL:
            self._mark_call(marker)
        else:
            if marker == self._form.guard.close:
                self._state = _State.CALL
            elif marker not in self._form.guard.escapes and self._first_end is None:
                self._first_end = (self._num_chars, marker)
            self._release(marker)

    def _mark_thinking(self, marker: str) -> None:
        opening, closing = self._form.think
        if marker == opening and self._fresh:
            return
        if marker == closing or marker in self._form.think_ends:
            self._state = _State.TEXT
            self._fresh = False
            if marker != closing:
                self._mark_text(marker)
        elif marker in self._form.openings:
            self._state = _State.HELD
            self._parts, self._num_chars = [], 0
            self._release(marker)
        else:
            self._release(marker)

    def _mark_text(self, marker: str) -> None:
        sections = dict(self._form.sections)
        if marker == self._form.think[0] and self._fresh:
            self._state = _State.THINK
            self._events.append(Reasoning(""))
        elif self._form.call and marker == self._form.call[0]:
            self._begin_call()
        elif marker in sections:
            self._fresh = False
            if not self._section_has_call:
                self._flush_pending()
            self._pending = [marker]
            self._section_end, self._section_has_call, self._in_markup = sections[marker], False, True
        elif marker == self._section_end:
            if not self._section_has_call:
                self._pending.append(marker)
                self._flush_pending()
            self._pending.clear()
            self._section_end, self._section_has_call, self._in_markup = None, False, False
        elif marker in self._form.dropped:
            self._fresh = False
        else:
            self._release(marker)

    def _begin_call(self) -> None:
        self._state = _State.CALL
        self._fresh = False
        self._parts, self._num_chars, self._first_end = [], 0, None

    def _mark_call(self, marker: str) -> None:
        if marker == self._form.guard.open:
            self._release(marker)
            self._state = _State.VALUE
        else:
            self._end_call_at(marker, "".join(self._parts))

    def _end_call_at(self, marker: str, body: str) -> None:
        """The call ends at its closing marker, or at one that shows that it was forgotten."""
        self._end_call(body, marker)
        if self._form.call and marker != self._form.call[1]:
            self._mark_text(marker)

    def _end_call(self, body: str, marker: str | None) -> None:
        """The call ends at the marker, or with the text."""
        assert self._form.call is not None and self._form.read is not None
        opening, closing = self._form.call
        self._state = _State.TEXT
        found = self._form.read(body, marker is not None, self._schemas)
        if not found:
            self._flush_pending()
            self._in_markup = False
            self._events.append(Content(opening + body + (closing if marker == closing else "")))
            return
        self._pending.clear()
        self._section_has_call = self._in_markup = self._section_end is not None
        self._events += found if isinstance(found, list) else [found]

    def _end_held(self) -> None:
        """The reasoning never closed: if it holds a call, it ended there; else it only spoke of one."""
        held = "".join(self._parts)
        parser = TagParser(self._form, self._schemas, thinking_open=False)
        events = [*parser.feed(held), *parser.finish()]
        first_call = next((at for at, event in enumerate(events) if isinstance(event, Call)), None)
        if first_call is None:
            self._events.append(Reasoning(held))
            return
        self._events += [Reasoning(event.text) for event in events[:first_call] if isinstance(event, Content)]
        self._events += events[first_call:]


@lru_cache(maxsize=64)
def _marker_sets(form: TagFormat) -> dict[_State, Markers]:
    section_ends = [closing for _, closing in form.sections]
    call = form.call or ()
    ends = [*call, *section_ends]
    return {
        state: Markers(frozenset(markers))
        for state, markers in {
            _State.THINK: [*form.think, *form.think_ends, *form.openings],
            _State.HELD: form.think[1:],
            _State.TEXT: [form.think[0], *form.openings, *section_ends, *form.dropped],
            _State.CALL: [form.guard.open, *ends] if call else [],
            _State.VALUE: [form.guard.close, *form.guard.escapes, *ends] if call else [],
        }.items()
    }
