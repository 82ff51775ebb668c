"""The message that a sampled text is. In: growing text. Out: content, reasoning and tool calls in OpenAI's shape.

The message does not depend on how the text is cut into pieces, and the deltas of all pieces add up to it. No text raises: what is
malformed stays content, as written.
"""

import hashlib
import itertools
from typing import Any, Literal

import msgspec

from batchgen.text.parsers.events import Call, Content, Event, Reasoning
from batchgen.text.parsers.formats import has_short_ids, is_exact, make_parser
from batchgen.text.parsers.values import ToolSchemas

_SPACE = " \t\r\n"


class FunctionCall(msgspec.Struct, kw_only=True):
    """What to call."""

    name: str
    """As the model wrote it; it need not be one of the tools."""
    arguments: str
    """A JSON object as text."""


class ToolCall(msgspec.Struct, kw_only=True):
    """One call of a tool."""

    id: str
    """The model's own where its format has ids (Kimi-K2, Mistral), else the parser's prefix and the call's number (Mistral: their hash)."""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True):
    """An assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    """The answer; None if there are only tool calls."""
    reasoning_content: str | None = None
    """What was thought; None if nothing was."""
    tool_calls: list[ToolCall] = []

    def as_openai(self) -> dict[str, Any]:
        """The message of a chat completion: without `reasoning_content` and `tool_calls` where there are none."""
        fields = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if value or name in ("role", "content")}


class MessageDelta(msgspec.Struct, kw_only=True):
    """More of a message: exactly one of content, reasoning and a whole call."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_call: ToolCall | None = None
    index: int | None = None
    """Which of the message's calls it is, 0-based."""

    def as_openai(self) -> dict[str, Any]:
        """The `delta` of a streamed chat completion."""
        if self.tool_call is not None:
            return {"tool_calls": [{"index": self.index, **msgspec.to_builtins(self.tool_call)}]}
        return {name: text for name in ("content", "reasoning_content") if (text := getattr(self, name)) is not None}


class MessageParser:
    """Reads one sample's text. `fmt` is one of `batchgen.text.parsers.formats.FORMATS`, as `control.format_for` finds it.

    `tools`, in OpenAI's shape, type the arguments of formats that do not say their type. `thinking_open`: the prompt ends inside the
    reasoning (`control.opens_thinking`). `call_prefix`: begins the ids of calls that have none; make it differ between the turns of a
    conversation. Raises ValueError for an unknown format, never for a text.
    """

    def __init__(self, fmt: str, tools: list[dict[str, Any]] | None = None, thinking_open: bool = False, *, call_prefix: str = "call_"):
        self._parser = make_parser(fmt, ToolSchemas(tools), thinking_open)
        self._exact = is_exact(fmt)
        self._prefix, self._short_ids = call_prefix, has_short_ids(fmt)
        self._thought = thinking_open
        """Whether there was reasoning, be it empty."""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._spaces: dict[type, list[str]] = {Reasoning: [], Content: []}
        """White space at the end, until it is known whether more follows."""

    def feed(self, text: str) -> list[MessageDelta]:
        """What became certain with this piece of text; nothing that could still become a marker or be trimmed."""
        return self._deltas(self._parser.feed(text))

    def finish(self) -> list[MessageDelta]:
        """No more text: the rest of the message."""
        deltas = self._deltas(self._parser.finish())
        spaces = "".join(self._spaces[Content])
        self._spaces[Content].clear()
        if spaces and not self._calls and (self._content or not self._thought):
            deltas.append(self._add(Content(spaces)))
        return deltas

    @property
    def message(self) -> Message:
        """The message so far."""
        content = "".join(self._content)
        return Message(
            content=content if content or not self._calls else None,
            reasoning_content="".join(self._reasoning) or None,
            tool_calls=list(self._calls),
        )

    def _deltas(self, events: list[Event]) -> list[MessageDelta]:
        deltas = []
        for kind, run in itertools.groupby(events, type):
            if kind is Call:
                deltas += [self._call(event) for event in run if isinstance(event, Call)]
                continue
            event = kind("".join([event.text for event in run if not isinstance(event, Call)]))
            whole = event if self._exact else self._trim(event)
            self._thought |= kind is Reasoning
            if whole is not None and whole.text:
                deltas.append(self._add(whole))
        return deltas

    def _trim(self, event: Reasoning | Content) -> Reasoning | Content | None:
        """The event without white space that templates put around reasoning and calls; what may be such waits."""
        kind = type(event)
        spaces = self._spaces[kind]
        if not event.text.strip(_SPACE):
            spaces.append(event.text)
            return None
        text = "".join(spaces) + event.text
        is_first = not (self._reasoning if kind is Reasoning else self._content)
        if is_first and (kind is Reasoning or self._thought or self._calls):
            text = text.lstrip(_SPACE)
        end = len(text.rstrip(_SPACE))
        self._spaces[kind] = [text[end:]] if text[end:] else []
        return kind(text[:end])

    def _add(self, event: Reasoning | Content) -> MessageDelta:
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return MessageDelta(reasoning_content=event.text)
        self._content.append(event.text)
        return MessageDelta(content=event.text)

    def _call(self, call: Call) -> MessageDelta:
        index, taken = len(self._calls), {other.id for other in self._calls}
        call_id = call.call_id if call.call_id and call.call_id not in taken else self._call_id(index)
        self._calls.append(ToolCall(id=call_id, function=FunctionCall(name=call.name, arguments=call.arguments)))
        return MessageDelta(tool_call=self._calls[-1], index=index)

    def _call_id(self, index: int) -> str:
        name = f"{self._prefix}{index}"
        return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:9] if self._short_ids else name
