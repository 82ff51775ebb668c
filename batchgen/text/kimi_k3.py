"""Kimi-K3's chat format, which has no Jinja template. In: chat messages, tools, controls. Out: segments, structural tokens or text.

A tag opens as `<|open|>`, its name and attributes, `<|sep|>`, and closes as `<|close|>`, its name, `<|sep|>`; a message ends with
`<|end_of_msg|>`. Those four are tokens of their own; names, attributes and contents are ordinary text, each piece encoded for itself,
so that no text of a user's is ever structure. Format: Moonshot's encoder as public renderers of it describe it (vLLM, Dynamo).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import ModelError, RequestError

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
EFFORTS = ("low", "high", "max")
KWARGS = ("thinking", "enable_thinking", "thinking_effort", "reasoning_effort", "tool_choice", "response_format")

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), supported values "
    "include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{tools}\n```"
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{schema}\n```"


@dataclass(frozen=True, slots=True)
class Token:
    """A structural token, by name."""

    name: str


Segment = Token | str
"""A structural token, or text that is encoded for itself and never becomes one."""


@dataclass(frozen=True, slots=True)
class Controls:
    """What a request says besides messages and tools."""

    thinking: bool
    effort: str | None
    tool_choice: str | None
    response_format: Any


def check_tokens(vocab: dict[str, int], where: str) -> None:
    """ModelError unless the tokenizer knows the four structural tokens; without them every chat would be noise to the model."""
    missing = [name for name in (OPEN, CLOSE, SEP, END) if name not in vocab]
    if missing:
        raise ModelError(
            f"{where}: model_type is kimi_k3, whose chats are built of {OPEN} {CLOSE} {SEP} {END}, but the tokenizer has no "
            f"{' '.join(missing)}; the tokenizer files are those of another model (Kimi-Linear has other names at the same ids)"
        )


def render(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool, kwargs: dict[str, Any]
) -> Iterator[Segment]:
    """The chat's segments. RequestError (code `chat_template`) for roles, tool results and controls that the format does not have."""
    controls = _controls(kwargs)
    if tools:
        yield from _system("tool-declare", _TOOLS.format(tools=_compact(tools)))
    if controls.thinking and controls.effort is not None:
        yield from _system("thinking-effort", _EFFORT.format(effort=controls.effort))
    at = 0
    calls: list[dict[str, Any]] = []
    while at < len(messages):
        message = messages[at]
        if message["role"] == "tool":
            run = [message]
            while at + len(run) < len(messages) and messages[at + len(run)]["role"] == "tool":
                run.append(messages[at + len(run)])
            for name, index, result in _results(calls, run):
                yield from _message([("role", "tool"), ("tool", name), ("index", str(index))], [result])
            at += len(run)
            continue
        role = {"developer": "system"}.get(message["role"], message["role"])
        if role not in ("system", "user", "assistant"):
            raise _refuse(f"messages[{at}] has role {message['role']!r}; Kimi-K3 knows system, user, assistant and tool")
        attributes = [("role", role), *([("name", message["name"])] if message.get("name") else [])]
        if role == "assistant":
            calls = message.get("tool_calls") or []
            yield from _message(attributes, _assistant(message, calls, controls.thinking))
        else:
            yield from _message(attributes, [_content(message)])
        at += 1
    if controls.tool_choice in _CHOICES:
        yield from _system("tool-choice", _CHOICES[controls.tool_choice])
    if controls.response_format is not None:
        yield from _system("response-format", _response_format(controls.response_format))
    if add_generation_prompt:
        yield from _open("message", [("role", "assistant")])
        yield from _open("think" if controls.thinking else "response")


def _controls(kwargs: dict[str, Any]) -> Controls:
    for name in kwargs:
        if name not in KWARGS:
            raise RequestError(f"Kimi-K3's chat format has no {name!r}; it has {', '.join(KWARGS)}", code="unknown_template_kwarg")
    thinking = _one_of(kwargs, "thinking", "enable_thinking")
    effort = _one_of(kwargs, "thinking_effort", "reasoning_effort")
    if effort == "none":
        if thinking:
            raise _refuse("reasoning_effort is 'none' and thinking is on; give one of them")
        thinking, effort = False, None
    if thinking not in (None, True, False):
        raise _refuse(f"thinking is true or false, got {thinking!r:.100}")
    if effort is None and "thinking_effort" not in kwargs:
        effort = "max"
    if effort is not None and effort not in EFFORTS:
        raise _refuse(f"thinking_effort is one of {', '.join(EFFORTS)}, or reasoning_effort 'none', got {effort!r:.100}")
    choice = kwargs.get("tool_choice")
    if choice not in (None, "auto", *_CHOICES):
        raise _refuse(f"tool_choice is auto, required or none, got {choice!r:.100}")
    form = kwargs.get("response_format")
    return Controls(True if thinking is None else thinking, effort, choice, form)


def _one_of(kwargs: dict[str, Any], name: str, alias: str) -> Any:
    value, other = kwargs.get(name), kwargs.get(alias)
    if value is not None and other is not None and value != other:
        raise _refuse(f"{name} is {value!r:.50} and {alias} is {other!r:.50}; give one of them")
    return other if value is None else value


def _response_format(form: Any) -> str:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind not in ("json_object", "json_schema"):
        raise _refuse(f"response_format is json_object or json_schema, got {form!r:.100}")
    text = _FORMAT.format(kind=kind)
    if kind == "json_object":
        return text
    schema = form.get("json_schema") if isinstance(form, dict) else None
    schema = schema.get("schema", schema) if isinstance(schema, dict) else None
    if schema is None:
        raise _refuse('response_format json_schema is {"type": "json_schema", "json_schema": {"schema": {...}}}')
    return text + _SCHEMA.format(schema=_compact(schema))


def _message(attributes: list[tuple[str, str]], content: Sequence[Segment] | Iterator[Segment]) -> Iterator[Segment]:
    yield from _open("message", attributes)
    yield from content
    yield from _close("message")
    yield Token(END)


def _system(kind: str, text: str) -> Iterator[Segment]:
    return _message([("role", "system"), ("type", kind)], [text])


def _assistant(message: dict[str, Any], calls: list[dict[str, Any]], thinking: bool) -> Iterator[Segment]:
    if thinking:
        reasoning = message.get("reasoning_content") or ""
        yield from _element("think", [], reasoning if reasoning.strip() else "")
    yield from _element("response", [], _content(message))
    if calls:
        yield from _open("tools")
        for index, call in enumerate(calls, 1):
            function = call["function"]
            yield from _open("call", [("tool", function["name"]), ("index", str(index))])
            yield from _arguments(function.get("arguments"))
            yield from _close("call")
        yield from _close("tools")


def _arguments(arguments: Any) -> Iterator[Segment]:
    if arguments is None:
        return
    if not isinstance(arguments, dict):
        yield from _element("json", [("type", "object")], arguments if isinstance(arguments, str) else json.dumps(arguments))
        return
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield from _element("argument", [("key", key), ("type", _type(value))], text)


def _results(calls: list[dict[str, Any]], run: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """(tool, 1-based index, content) of consecutive tool messages, in the calls' order when every one names its call."""
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        for label in (call.get("id"), f"{call['function']['name']}:{place}"):
            if label:
                places.setdefault(label, place)
    labels = [message.get("tool_call_id") or "" for message in run]
    found = [places[label] for label in labels if label in places]
    if len(found) == len(run):
        pairs = sorted(zip(found, range(len(run)), strict=True))
        return [(calls[place]["function"]["name"], place + 1, _content(run[order])) for place, order in pairs]
    named = []
    for place, message in enumerate(run):
        name = message.get("name") or (calls[place]["function"]["name"] if place < len(calls) else None)
        if name is None:
            raise _refuse("a tool message answers no call of the assistant turn before it; give it that call's tool_call_id, or a name")
        named.append((name, place + 1, _content(message)))
    return named


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise _refuse(f"a message's content is text, got {content!r:.100}")
    return content


def _element(tag: str, attributes: list[tuple[str, str]], content: str) -> Iterator[Segment]:
    yield from _open(tag, attributes)
    yield content
    yield from _close(tag)


def _open(tag: str, attributes: Sequence[tuple[str, str]] = ()) -> Iterator[Segment]:
    yield Token(OPEN)
    yield tag
    for name, value in attributes:
        yield f' {name}="'
        yield value.replace("&", "&amp;").replace('"', "&quot;")
        yield '"'
    yield Token(SEP)


def _close(tag: str) -> Iterator[Segment]:
    yield Token(CLOSE)
    yield tag
    yield Token(SEP)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", dict: "object", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "number")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _refuse(message: str) -> RequestError:
    return RequestError(message, code="chat_template")
