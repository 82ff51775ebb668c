"""Values of tool arguments. In: JSON, or plain text and the tools' JSON schemas. Out: JSON values, and arguments as text. Never raises.

Sampled text is not trusted: numbers without end, nesting without end and halves of surrogate pairs are "not JSON" here.
"""

import json
from typing import Any, Final

NOT_JSON: Final = object()
"""What `read_json` returns for text that is not JSON."""

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_MAX_REFS = 8


def read_json(text: str, strict: bool = False) -> Any:
    """The value, or NOT_JSON. Not strict: raw control characters inside strings (models write line breaks there) are accepted."""
    try:
        return json.loads(text, strict=strict, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NOT_JSON


def write_json(value: Any) -> str | None:
    """JSON text that can be sent on, or None if there is none (infinite numbers, nesting without end)."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_sendable(text) else json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def is_sendable(text: str) -> bool:
    """Whether the text is valid Unicode: JSON escapes can spell half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def object_text(text: str, closed: bool) -> str | None:
    """Text of a JSON object as a caller can parse it: unchanged where it is strictly JSON; nothing, if closed, means no arguments."""
    text = text.strip()
    if not text and closed:
        return "{}"
    if not text.startswith("{"):
        return None
    value = read_json(text)
    if not isinstance(value, dict):
        return None
    return text if read_json(text, strict=True) is not NOT_JSON else write_json(value)


class ToolSchemas:
    """Types of parameters, from tools in OpenAI's shape (with or without the outer `function`). What is malformed types nothing."""

    def __init__(self, tools: list[dict[str, Any]] | None):
        self._parameters: dict[str, dict[str, Any]] = {}
        for tool in tools or []:
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[function["name"]] = parameters if isinstance(parameters, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def typed(self, tool: str, parameter: str, text: str) -> Any:
        """The text as the type that the parameter's schema asks for; as it stands if it is none of these.

        Text that could be a string and something narrower is the narrower. Without a schema JSON is read as JSON.
        """
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        types = _types(properties.get(parameter) if isinstance(properties, dict) else None, root, _MAX_REFS)
        if types == {"string"}:
            return text
        value = read_json(text.strip())
        if types is None:
            return text if value is NOT_JSON else value
        if value is NOT_JSON:
            value = _WORDS.get(text.strip().lower(), NOT_JSON)
        if "integer" in types and "number" not in types and isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if _kinds(value) & types - {"string"} else text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _kinds(value: Any) -> set[str]:
    """JSON schema's names for the value's type."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names: dict[type, set[str]] = {float: {"number"}, str: {"string"}, dict: {"object"}, list: {"array"}}
    return names.get(type(value), set())


def _types(schema: Any, root: dict[str, Any], refs_left: int) -> set[str] | None:
    """Names of the types that a schema allows; None if it does not say."""
    if not isinstance(schema, dict):
        return None
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, refs_left - 1) if refs_left else None
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str | list):
        found |= {name for name in ([declared] if isinstance(declared, str) else declared) if isinstance(name, str)}
    elif isinstance(schema.get("enum"), list):
        found |= {name for value in schema["enum"] for name in _kinds(value)}
    elif "const" in schema:
        found |= _kinds(schema["const"])
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            for branch in branches if isinstance(branches, list) and refs_left else []:
                found |= _types(branch, root, refs_left - 1) or set()
    if not found and isinstance(schema.get("properties"), dict):
        found.add("object")
    if not found and "items" in schema:
        found.add("array")
    if found and schema.get("nullable") is True:
        found.add("null")
    return found or None


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """The part of the tool's parameters that `#/a/b` names."""
    node: Any = root
    for step in reference.removeprefix("#/").split("/"):
        node = node.get(step) if isinstance(node, dict) else None
    return node
