"""How each family writes a tool call. In: what stands between a call's opening and closing marker. Out: the call, or None if malformed.

`closed` says that a marker ended the call: where the text itself does not show that it is complete, an unclosed call is none.
"""

import re
from collections.abc import Callable
from typing import Any

from batchgen.text.parsers.events import Call
from batchgen.text.parsers.values import NOT_JSON, ToolSchemas, object_text, read_json, write_json

Reader = Callable[[str, bool, ToolSchemas], Call | list[Call] | None]
"""A list where one pair of markers is around several calls."""

DSML = "｜DSML｜"
_NAME = re.compile(r"[\w.:/-]{1,128}")  # what requests may name a tool, so that a call can be part of the next prompt
_QUOTED_NAME = re.compile(r"""\s*(?:"([^"\n]*)"|'([^'\n]*)'|([^>\s"']+))\s*>""")
_XML_NAME = re.compile(r"([^>\n]*)>")
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]*)>")
_NAMED_PARAMETER = re.compile(r"""<parameter name=(?:"([^"\n]*)"|'([^'\n]*)'|([^>\s"']+))\s*>""")
_DSML_PARAMETER = re.compile(rf"""<{DSML}parameter name="([^"\n]*)"(?:\s+string="(true|false)")?\s*>""")
_K3_ATTRIBUTES = r"""(?P<attributes>(?:\s*[\w-]+="[^"]*")*)\s*<\|sep\|>"""
_K3_HEAD = re.compile(_K3_ATTRIBUTES)
_K3_ARGUMENT = re.compile(r"<\|open\|>argument " + _K3_ATTRIBUTES)
_K3_JSON = re.compile(r"\s*<\|open\|>json" + _K3_ATTRIBUTES + r"(?P<value>.*)<\|close\|>json<\|sep\|>\s*", re.DOTALL)
_ATTRIBUTE = re.compile(r"""([\w-]+)="([^"]*)\"""")
_GLM_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+", re.DOTALL)


def hermes(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`{"name": "f", "arguments": {...}}`, complete when the JSON is."""
    value = read_json(body)
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # encoded twice
        return _call(value.get("name"), object_text(arguments, closed))
    return _call(value.get("name"), write_json({} if arguments is None else arguments) if isinstance(arguments, dict | None) else None)


def qwen_xml(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`f>` and then `<parameter=key>`, the value on lines of its own, `</parameter>`."""
    head = _XML_NAME.match(body)
    if head is None or not closed:
        return None
    name = head[1].strip().strip("\"'")
    return _with_parameters(
        name,
        _parameters(body[head.end() :], _XML_PARAMETER, "</parameter>"),
        lambda match, text: (match[1].strip().strip("\"'"), schemas.typed(name, match[1].strip().strip("\"'"), _inner_lines(text))),
    )


def minimax_xml(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`"f">` and then `<parameter name="key">value</parameter>`."""
    head = _QUOTED_NAME.match(body)
    if head is None or not closed:
        return None
    name = head[1] or head[2] or head[3] or ""

    def read(match: re.Match[str], text: str) -> tuple[str, Any]:
        key = match[1] or match[2] or match[3] or ""
        return key, schemas.typed(name, key, text)

    return _with_parameters(name, _parameters(body[head.end() :], _NAMED_PARAMETER, "</parameter>"), read)


def dsml(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """DeepSeek-V3.2: `f">` and then parameters that say themselves whether they are strings or JSON."""
    name, found, rest = body.partition('">')
    if not found or not closed:
        return None

    def read(match: re.Match[str], text: str) -> tuple[str, Any]:
        if match[2] is None:
            return match[1], schemas.typed(name, match[1], text)
        return match[1], text if match[2] == "true" else _json_or_text(text)

    return _with_parameters(name, _parameters(rest, _DSML_PARAMETER, f"</{DSML}parameter>"), read)


def glm(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`f` and then `<arg_key>key</arg_key><arg_value>value</arg_value>`."""
    name, found, rest = body.partition("<arg_key>")
    if not closed:
        return None
    name = name.strip()
    return _with_parameters(
        name,
        _parameters(found + rest, _GLM_KEY, "</arg_value>"),
        lambda match, text: (match[1].strip(), schemas.typed(name, match[1].strip(), text)),
    )


def kimi_k3(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`tool="f" index="1"<|sep|>` and then arguments that name their JSON type, or all of them as one `json` element."""
    head = _K3_HEAD.match(body)
    if head is None or not closed:
        return None
    name = _attributes(head["attributes"]).get("tool")
    whole = _K3_JSON.fullmatch(body, head.end())
    if whole is not None:
        return _call(name, object_text(whole["value"], closed))

    def read(match: re.Match[str], text: str) -> tuple[str, Any]:
        attributes = _attributes(match["attributes"])
        return attributes.get("key", ""), text if attributes.get("type", "string") == "string" else _json_or_text(text)

    return _with_parameters(name, _parameters(body[head.end() :], _K3_ARGUMENT, "<|close|>argument<|sep|>"), read)


def kimi_k2(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """`functions.f:0<|tool_call_argument_begin|>{...}`; what stands before the arguments is the call's id."""
    head, found, arguments = body.partition("<|tool_call_argument_begin|>")
    head = head.strip()
    numbered = _KIMI_ID.fullmatch(head)
    name = numbered["name"] if numbered else head.removeprefix("functions.")
    return _call(name, object_text(arguments, closed) if found else None, head if numbered else None)


def deepseek_v3(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """DeepSeek-V3 and R1: `function<｜tool▁sep｜>f`, then the arguments in a fenced block."""
    _, _, rest = body.partition("<｜tool▁sep｜>")
    name, _, arguments = rest.strip().partition("\n")
    arguments = arguments.strip()
    if arguments.startswith("```"):
        arguments = arguments.removeprefix("```json").removeprefix("```").removesuffix("```")
    return _call(name.strip(), object_text(arguments, closed))


def deepseek_v31(body: str, closed: bool, schemas: ToolSchemas) -> Call | None:
    """DeepSeek-V3.1: `f<｜tool▁sep｜>{...}`."""
    name, found, arguments = body.partition("<｜tool▁sep｜>")
    return _call(name.strip(), object_text(arguments, closed) if found else None)


def mistral(body: str, closed: bool, schemas: ToolSchemas) -> list[Call] | None:
    """`[{"name": "f", "arguments": {...}}, ...]`, or in later models `f[ARGS]{...}` with `[CALL_ID]` and an id before it."""
    value = read_json(body)
    if isinstance(value, list):
        calls = [_mistral_entry(entry) for entry in value]
        return [call for call in calls if call is not None] if None not in calls else None
    head, brace, arguments = body.partition("{")
    name, found, call_id = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    call = _call(name.strip(), object_text(brace + arguments, closed) if brace else None, call_id.strip() if found else None)
    return None if call is None else [call]


def bare_call(value: Any) -> Call | None:
    """Llama 3: `{"name": "f", "parameters": {...}}` and nothing else in it."""
    if not isinstance(value, dict) or value.keys() - {"type"} not in ({"name", "parameters"}, {"name", "arguments"}):
        return None
    arguments = value.get("parameters", value.get("arguments"))
    return _call(value["name"], write_json(arguments) if isinstance(arguments, dict) else None)


def _mistral_entry(entry: Any) -> Call | None:
    if not isinstance(entry, dict):
        return None
    arguments, call_id = entry.get("arguments"), entry.get("id")
    text = object_text(arguments, True) if isinstance(arguments, str) else write_json(arguments) if isinstance(arguments, dict) else None
    return _call(entry.get("name"), text, call_id if isinstance(call_id, str) else None)


def _call(name: Any, arguments: str | None, call_id: str | None = None) -> Call | None:
    if arguments is None or not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    return Call(name, arguments, call_id)


def _with_parameters(
    name: str | None,
    parameters: list[tuple[re.Match[str], str]] | None,
    read: Callable[[re.Match[str], str], tuple[str, Any]],
) -> Call | None:
    if parameters is None:
        return None
    arguments = dict(read(head, text) for head, text in parameters)
    return _call(name, write_json(arguments) if "" not in arguments else None)


def _parameters(body: str, head: re.Pattern[str], close: str) -> list[tuple[re.Match[str], str]] | None:
    """Every parameter's head and raw value; None if anything else stands between them.

    A value ends at `close`, or where the next head begins: models forget the former more often than they write the latter.
    """
    found = []
    heads = head.finditer(body)
    following = next(heads, None)
    at, end = 0, -1
    while following is not None:
        current = following
        if body[at : current.start()].strip():
            return None
        following = next(heads, None)
        limit = len(body) if following is None else following.start()
        if end < current.end():
            end = body.find(close, current.end())
            end = len(body) if end < 0 else end
        if end < limit:
            found.append((current, body[current.end() : end]))
            at = end + len(close)
        else:
            found.append((current, body[current.end() : limit]))
            at = limit
    return None if body[at:].strip() else found


def _inner_lines(text: str) -> str:
    """Without the line break after the opening and before the closing tag, which belong to the markup."""
    return text.removeprefix("\n").removesuffix("\n")


def _json_or_text(text: str) -> Any:
    value = read_json(text)
    return text if value is NOT_JSON else value


def _attributes(text: str) -> dict[str, str]:
    return {match[1]: match[2].replace("&quot;", '"').replace("&amp;", "&") for match in _ATTRIBUTE.finditer(text)}
