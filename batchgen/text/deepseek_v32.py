"""DeepSeek-V3.2's chat format, which has no Jinja template. In: chat messages, tools, whether to think. Out: the prompt's text.

The text is that of the encoder which DeepSeek publishes with the weights. Turns that it would refuse are refused, and so are results
that do not belong to the calls before them.
"""

import json
from typing import Any

from batchgen.errors import RequestError
from batchgen.text.parsers.syntax import DSML

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOKENS = (BOS, EOS, USER, ASSISTANT)
ROLES = ("system", "user", "assistant", "tool")
_OPEN, _CLOSE = "<think>", "</think>"
_TOOLS = f"""## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. \
The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:
<{DSML}function_calls>
...
</{DSML}function_calls>
<function_results>
...
</function_results>
{_OPEN}...thinking about results{_CLOSE}
Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""


class DeepseekV32Format:
    """Stands where other models have a ChatTemplate."""

    source = ""

    def settle(self, variables: dict[str, Any], tools: bool) -> dict[str, Any]:
        """`{"thinking": ...}`, for either name of that control. RequestError for any other, and for values that are not booleans."""
        given = {name: value for name, value in variables.items() if value is not None}
        for name, value in given.items():
            if name not in ("thinking", "enable_thinking"):
                message = f"DeepSeek-V3.2's chat format has no {name!r}, so it would change nothing; it has: thinking, enable_thinking"
                raise RequestError(message, code="unknown_template_kwarg")
            if not isinstance(value, bool):
                raise RequestError(f"{name} is true or false, got {value!r:.100}", code="invalid_template_kwargs")
        if len(set(given.values())) > 1:
            raise RequestError(
                "thinking and enable_thinking are the same control with two values; give one", code="invalid_template_kwargs"
            )
        return {"thinking": any(given.values())}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError (code `chat_template`) for turns that the format cannot hold."""
        thinking = bool((variables or {}).get("thinking"))
        messages = _with_tools(messages, tools)
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        parts, at = [BOS], 0
        while at < len(messages):
            message, end = messages[at], at + 1
            if message["role"] not in ROLES:
                raise _refuse(f"messages have roles {', '.join(ROLES)} in DeepSeek-V3.2's format, got {message['role']!r:.50}")
            while message["role"] == "tool" and end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            thinks = thinking and end > last_user
            if message["role"] == "system":
                parts.append(_text(message))
            elif message["role"] == "assistant":
                parts.append(_assistant(message, thinks))
            else:
                parts.append(USER + _text(message) if message["role"] == "user" else _results(messages, at, end))
                if add_generation_prompt or end < len(messages):
                    parts.append(ASSISTANT if message["role"] == "user" else "\n\n")
                    parts.append(_OPEN if thinks else _CLOSE)
            at = end
        return "".join(parts)


def _with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools are the end of the system message, which is made if there is none."""
    if not tools:
        return messages
    declared = _TOOLS % "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    system, rest = ("", messages) if messages[0]["role"] != "system" else (_text(messages[0]), messages[1:])
    return [{"role": "system", "content": f"{system}\n\n{declared}"}, *rest]


def _assistant(message: dict[str, Any], thinks: bool) -> str:
    reasoning, calls = message.get("reasoning_content") or "", message.get("tool_calls") or []
    if thinks and not (reasoning or calls):
        raise _refuse("an assistant turn after the last user's has reasoning_content or tool_calls when thinking is on; give one")
    text = (reasoning + _CLOSE if thinks else "") + _text(message)
    if calls:
        blocks = [f'<{DSML}invoke name="{call["function"]["name"]}">\n{_parameters(call["function"])}\n</{DSML}invoke>' for call in calls]
        text += "\n\n" + "\n".join([f"<{DSML}function_calls>", *blocks, f"</{DSML}function_calls>"])
    return text + EOS


def _parameters(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        raise _refuse(f"arguments of a call are a JSON object in DeepSeek-V3.2's format, got {arguments!r:.100}")
    lines = []
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        lines.append(f'<{DSML}parameter name="{key}" string="{"true" if is_text else "false"}">{shown}</{DSML}parameter>')
    return "\n".join(lines)


def _results(messages: list[dict[str, Any]], start: int, end: int) -> str:
    """What the calls before `start` gave, in their order where every result names its call."""
    calls = messages[start - 1].get("tool_calls") or [] if start else []
    results = messages[start:end]
    if len(calls) != len(results):
        raise _refuse(f"messages[{start}] begins {len(results)} tool results after a turn with {len(calls)} tool calls; give one for each")
    places = {call.get("id"): place for place, call in enumerate(calls)}
    named = [places.get(result.get("tool_call_id")) for result in results]
    if sorted(place for place in named if place is not None) == list(range(len(calls))):
        results = [result for _, result in sorted(zip(named, results, strict=True), key=lambda pair: pair[0] or 0)]
    lines = [f"<result>{_text(result)}</result>" for result in results]
    return "\n\n" + "\n".join(["<function_results>", *lines, "</function_results>"])


def _text(message: dict[str, Any]) -> str:
    return message.get("content") or ""


def _refuse(message: str) -> RequestError:
    return RequestError(message, code="chat_template")
