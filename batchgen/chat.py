"""A chat request. In: messages, tools and template controls as users write them. Out: the same, checked, in one form. No template engine.

The same checks serve `LLM`, the client, the node and batch jobs, so what one of them takes, all take.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from batchgen.errors import RequestError

MAX_MESSAGES = 1024
"""Messages of one chat."""
MAX_TOOLS = 512
"""Tools of one request."""
MAX_TOOLS_BYTES = 256 * 1024
"""The tools of one request as JSON."""
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024
"""The template kwargs of one request as JSON."""
MAX_DEPTH = 32
"""Deepest nesting inside tools, template kwargs and arguments of calls."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "return_dict"})
"""Names of a template's surroundings: requests cannot set them as kwargs."""

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
_KWARG_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MESSAGE_KEYS = "role, content, name, tool_calls, tool_call_id and reasoning_content"


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an earlier assistant turn called."""

    name: str
    arguments: str
    """JSON text; usually an object."""


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of a chat. The wire's form as well."""

    role: str
    content: str
    """Empty where a turn has none."""
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A chat with tools and template controls of its own, for batches in which they differ from prompt to prompt."""

    messages: list[Any]
    tools: list[Any] | None = None
    """OpenAI function schemas; None: those of the call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """For the chat template, e.g. `{"enable_thinking": False}`; None: those of the call."""


def check_messages(messages: Any) -> list[Message]:
    """Messages as objects of the OpenAI API. RequestError (`invalid_messages`) names the message and what is wrong with it."""
    if not isinstance(messages, list | tuple) or not messages:
        raise _wrong("messages", f"chat messages are a non-empty list, got {messages!r:.100}")
    if len(messages) > MAX_MESSAGES:
        raise _wrong("messages", f"a chat has at most {MAX_MESSAGES} messages, got {len(messages)}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A copy of OpenAI function schemas; None for none. RequestError (`invalid_tools`)."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise _wrong("tools", f'tools is a list of {{"type": "function", "function": {{...}}}}, got {tools!r:.100}')
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"a request has at most {MAX_TOOLS} tools, got {len(tools)}")
    positions: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = _tool_name(f"tools[{index}]", tool)
        if name in positions:
            raise _wrong("tools", f"tools[{positions[name]}] and tools[{index}] are both named {name!r}; calls could not be told apart")
        positions[name] = index
    return _plain(list(tools), "tools", MAX_TOOLS_BYTES) or None


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """A copy of template kwargs; empty for None. RequestError (`invalid_template_kwargs`)."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise _wrong("template_kwargs", f"chat_template_kwargs is an object of names and values, got {kwargs!r:.100}")
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise _wrong("template_kwargs", f"chat_template_kwargs has at most {MAX_TEMPLATE_KWARGS} names, got {len(kwargs)}")
    for name in kwargs:
        if not isinstance(name, str) or not _KWARG_NAME.fullmatch(name):
            raise _wrong("template_kwargs", f"a name in chat_template_kwargs is letters, digits and _, at most 64, got {name!r:.100}")
        if name in RESERVED:
            raise _wrong("template_kwargs", f"chat_template_kwargs cannot set {name!r}: the template gets that from the request itself")
    copied: dict[str, Any] = _plain(dict(kwargs), "template_kwargs", MAX_TEMPLATE_KWARGS_BYTES)
    return copied


def template_message(message: Message) -> dict[str, Any]:
    """The message as templates know it."""
    found = {
        key: value
        for key in ("role", "content", "name", "tool_call_id", "reasoning_content")
        if (value := getattr(message, key)) is not None
    }
    if message.tool_calls:
        found["tool_calls"] = [{"type": "function", **msgspec.to_builtins(call)} for call in message.tool_calls]
    return found


def parse_arguments(text: str) -> Any:
    """The object in a call's arguments; the text itself where it is not one (a model's broken JSON). Empty text is no arguments."""
    try:
        value = json.loads(text) if text.strip() else {}
        return _copy(value, "arguments", 0) if isinstance(value, dict) else text
    except (ValueError, RecursionError):
        return text


def _wrong(what: str, message: str) -> RequestError:
    return RequestError(message, code=f"invalid_{what}")


def _message(where: str, message: Any) -> Message:
    if isinstance(message, Message):
        return message
    if isinstance(message, msgspec.Struct):  # a sample's own message
        message = msgspec.to_builtins(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _wrong("messages", f"{where} is an object with a string `role`, got {message!r:.100}")
    given = {key: value for key, value in message.items() if value is not None}
    for alias in ("reasoning", "thinking"):
        if alias in given:
            given.setdefault("reasoning_content", given.pop(alias))
    if "content" not in given and given["role"] != "assistant":
        raise _wrong("messages", f"{where} has no content; only an assistant turn may have none")
    given["content"] = _text(where, given.get("content", ""))
    if "tool_calls" in given:
        given["tool_calls"] = _calls(where, given["tool_calls"])
    try:
        return msgspec.convert(given, Message)
    except msgspec.ValidationError as error:
        raise _wrong("messages", f"{where}: {error}; a message has {_MESSAGE_KEYS}") from None


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong("messages", f"{where}.content is a string or a list of text parts, got {content!r:.100}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong("messages", f"{where}.content has a part that is not text; only text is supported, got {part!r:.100}")
    return "".join(part["text"] for part in content)


def _calls(where: str, calls: Any) -> list[dict[str, Any]] | None:
    if not isinstance(calls, list):
        raise _wrong("messages", f"{where}.tool_calls is a list, got {calls!r:.100}")
    found = []
    for index, call in enumerate(calls):
        at = f"{where}.tool_calls[{index}]"
        if isinstance(call, ToolCall):
            call = msgspec.to_builtins(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong("messages", f'{at} is {{"id", "type": "function", "function": {{"name", "arguments"}}}}, got {call!r:.100}')
        if call.get("type", "function") != "function":
            raise _wrong("messages", f"{at}.type is 'function', got {call['type']!r:.100}")
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, dict):
            arguments = json.dumps(_copy(arguments or {}, "messages", 0), ensure_ascii=False)
        if not isinstance(arguments, str):
            raise _wrong("messages", f"{at}.function.arguments is JSON text or an object, got {arguments!r:.100}")
        entry: dict[str, Any] = {"function": {"name": function["name"], "arguments": arguments}}
        if call.get("id") is not None:
            entry["id"] = call["id"]
        found.append(entry)
    return found or None


def _tool_name(where: str, tool: Any) -> str:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(tool.get("function"), dict):
        raise _wrong("tools", f'{where} is {{"type": "function", "function": {{"name", "description", "parameters"}}}}, got {tool!r:.100}')
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise _wrong("tools", f"{where}.function.name is 1 to 128 letters, digits and _ . : / -, got {name!r:.150}")
    if parameters is not None and not isinstance(parameters, dict):
        raise _wrong("tools", f"{where}.function.parameters is a JSON schema, got {parameters!r:.100}")
    return name


def _plain(value: Any, what: str, max_bytes: int) -> Any:
    """A copy of a JSON value that is not too large."""
    copied = _copy(value, what, 0)
    size = len(json.dumps(copied, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if size > max_bytes:
        raise _wrong(what, f"{what} have {size} bytes as JSON, the limit is {max_bytes}")
    return copied


def _copy(value: Any, what: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _wrong(what, f"{what} nest at most {MAX_DEPTH} deep")
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [_copy(item, what, depth + 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _copy(item, what, depth + 1) for key, item in value.items()}
    raise _wrong(what, f"{what} hold strings, finite numbers, lists and objects with string keys, got {value!r:.100}")
