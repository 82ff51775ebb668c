"""What a parser says about a text. In: nothing. Out: reasoning, content and calls, in the order of the text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought; empty where the thinking begins."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer; also markup that turned out to be malformed."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One complete tool call."""

    name: str
    arguments: str
    """A JSON object as text."""
    call_id: str | None = None
    """The id that the model itself gave the call."""


Event = Reasoning | Content | Call
