"""Chat messages to prompt text. In: a Jinja template and JSON-like messages. Out: the rendered string. Never tokenises, never runs code.

The template is data from the model folder: it runs in Jinja's immutable sandbox with the few names that Hugging Face gives it.
Requests bring messages, tools and variables, never a template.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import cached_property, wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.chat import RESERVED, parse_arguments
from batchgen.errors import RequestError

MAX_RENDERED_CHARS = 1 << 24
"""Longest prompt text, and the most that one operation inside a template may ask for."""
MAX_WIDTH = 10_000
"""Field widths in format strings are smaller."""
MAX_DEPTH = 32
"""Deepest nesting of lists and objects inside messages and tools."""
MAX_NODES = 1 << 20
"""Most values inside the messages, tools and variables of one prompt."""

_LONG_NUMBER = re.compile(r"\d{5}")
_ALIASES = {"enable_thinking": "thinking", "thinking": "enable_thinking"}
_THINKING_OF_MESSAGE = re.compile(r"message\.thinking\b|message\[['\"]thinking['\"]\]")


class ChatTemplate:
    """One template, compiled on first use. `special_tokens` are the names the template may use (`bos_token`, ...)."""

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None, now: Callable[[], datetime] = datetime.now):
        self.source = source
        self._special_tokens = special_tokens or {}
        self._now = now

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises RequestError(code `chat_template`) for whatever the template refuses or does wrong."""
        if self._says_thinking:
            messages = [_renamed(message, "reasoning_content", "thinking") for message in messages]
        names = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts, num_chars = [], 0
        try:
            for part in self._template.generate(names):
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise SecurityError(f"it renders more than {MAX_RENDERED_CHARS} characters")
                parts.append(part)
        except Exception as error:  # a template can raise anything: its own messages, type errors, recursion
            raise RequestError(f"the chat template refused these messages: {error}", code="chat_template") from error
        return "".join(parts)

    def settle(self, variables: dict[str, Any], tools: bool) -> dict[str, Any]:
        """The variables under the names this template reads: `enable_thinking` and `thinking` stand for one another.

        Raises RequestError for one that the template never reads, or that would hide a name of its own, and for tools it never reads.
        """
        reads, own = self._reads
        if tools and "tools" not in reads:
            raise RequestError("this model's chat template never reads tools, so the model would not see them", code="no_tools_in_template")
        settled: dict[str, Any] = {}
        for name, value in variables.items():
            if name in own or name in RESERVED:
                raise RequestError(
                    f"chat_template_kwargs cannot set {name!r}, a name of the template's own", code="invalid_template_kwargs"
                )
            target = name if name in reads else _ALIASES.get(name, name)
            if target not in reads:
                known = ", ".join(sorted(reads - own - RESERVED)) or "none"
                message = f"this model's chat template never reads {name!r}, so it would change nothing; it reads: {known}"
                raise RequestError(message, code="unknown_template_kwarg")
            if settled.setdefault(target, value) != value:
                raise RequestError(f"{name} and {target} are the same control with two values; give one", code="invalid_template_kwargs")
        return settled

    @cached_property
    def _reads(self) -> tuple[frozenset[str], frozenset[str]]:
        """(variables that the template looks up, those that are not a request's to set)."""
        environment = self._template.environment
        own = frozenset(environment.globals) | frozenset(self._special_tokens)
        tree = environment.parse(self.source)
        return frozenset(jinja2.meta.find_undeclared_variables(tree)) & _looked_up_first(tree), own

    @cached_property
    def _says_thinking(self) -> bool:
        """Whether an earlier turn's reasoning is called `thinking` here (gpt-oss) and not `reasoning_content`."""
        return "reasoning_content" not in self.source and bool(_THINKING_OF_MESSAGE.search(self.source))

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return self._environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"the model's chat template is not valid: {error}", code="chat_template") from error

    def _environment(self) -> jinja2.Environment:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        environment.filters = {name: _guarded(function) for name, function in environment.filters.items()}
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        return environment


def _looked_up_first(tree: jinja2.nodes.Template) -> set[str]:
    """Names that the template looks up before it sets them, if it sets them at all: its own work variables are not for requests.

    jinja2.meta alone calls a name undeclared when it is set in one branch and looked up in another.
    """
    found: dict[str, bool] = {}

    def walk(node: jinja2.nodes.Node, bound: frozenset[str]) -> None:
        if isinstance(node, jinja2.nodes.Name):
            if node.name not in bound:
                found.setdefault(node.name, node.ctx == "load")
            return
        children = list(node.iter_child_nodes())
        if isinstance(node, jinja2.nodes.Macro | jinja2.nodes.CallBlock):
            bound |= {argument.name for argument in node.args}
        elif isinstance(node, jinja2.nodes.Assign | jinja2.nodes.AssignBlock):
            children.remove(node.target)
            children.append(node.target)
        elif isinstance(node, jinja2.nodes.For):
            children.remove(node.iter)
            children.insert(0, node.iter)
        for child in children:
            walk(child, bound)

    walk(tree, frozenset())
    return {name for name, is_read in found.items() if is_read}


class Arguments(dict[str, Any]):
    """A call's arguments: an object to templates that want one, and the text as it was to those that print or join it."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Any) -> str:
        return self.text + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + self.text


def with_arguments(messages: list[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Copies of the messages, every string changed; arguments of calls become Arguments where their text is a JSON object.

    They are parsed before the change: an escape in the JSON could spell what the text does not show.
    """
    copies: list[dict[str, Any]] = []
    for message in messages:
        copy = map_strings(message, change)
        for call, original in zip(_functions(copy), _functions(message), strict=True):
            given = original.get("arguments")
            value = parse_arguments(given) if isinstance(given, str) else given
            if isinstance(value, dict):
                arguments = Arguments(map_strings(value, change))
                arguments.text = change(given) if isinstance(given, str) else json.dumps(arguments, ensure_ascii=False)
                call["arguments"] = arguments
        copies.append(copy)
    return copies


def _functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list | tuple) else []
    return [call["function"] if isinstance(call.get("function"), dict) else call for call in calls]


def _renamed(message: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if key == old and new not in message else key: value for key, value in message.items()}


def check_messages(messages: Any) -> None:
    """Raise RequestError unless messages is a list of JSON-like objects, each with a role."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"chat messages are a non-empty list, got {messages!r:.100}", code="invalid_messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"a chat message is an object with a string `role`, got {message!r:.100}", code="invalid_messages")


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A deep copy of a JSON-like value with every string (keys too) changed. Raises RequestError for anything not JSON-like."""
    left = MAX_NODES

    def copy(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise RequestError(f"messages nest at most {MAX_DEPTH} deep and hold at most {MAX_NODES} values", code="invalid_messages")
        if isinstance(value, str):
            return change(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, list | tuple):
            return [copy(item, depth + 1) for item in value]
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {change(key): copy(item, depth + 1) for key, item in value.items()}
        raise RequestError(f"messages hold strings, numbers, lists and objects, got {type(value).__name__}", code="invalid_messages")

    return copy(value, 0)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox that also refuses single operations with huge results."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse before computing: repetition, powers and padding; after: concatenation."""
        sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
        numbers = [abs(side) for side in (left, right) if isinstance(side, int)]
        if operator == "*" and sizes and numbers:
            _check_size(sizes[0] * numbers[0])
        elif operator == "**" and len(numbers) == 2:
            _check_size(numbers[0].bit_length() * numbers[1])
        elif operator == "+" and len(sizes) == 2:
            _check_size(sum(sizes))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Refuse loudly; Jinja would render nothing."""
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not available in a chat template")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse numbers that ask for huge padding, and replacements that multiply."""
        _check_arguments(args, kwargs)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ in ("replace", "join"):
                _check_growth(__obj.__name__, owner, args)
            elif __obj.__name__ in ("format", "format_map"):
                _check_widths(owner)
        return super().call(__context, __obj, *args, **kwargs)


def _check_size(size: int) -> None:
    if size > MAX_RENDERED_CHARS:
        raise SecurityError(f"an operation asks for {size} items, the limit is {MAX_RENDERED_CHARS}")


def _check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _check_size(abs(value))


def _check_widths(form: str) -> None:
    if _LONG_NUMBER.search(form):
        raise SecurityError(f"a format asks for a width of {MAX_WIDTH} or more")


def _check_growth(name: str, text: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
        _check_size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(len(text) + len(item) for item in args[0] if isinstance(item, str)))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses huge numbers and growth as calls do."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if function.__name__ == "do_replace" and values and isinstance(values[0], str):
            _check_growth("replace", values[0], values[1:])
        elif function.__name__ == "do_format" and values and isinstance(values[0], str):
            _check_widths(values[0])
        elif function.__name__.endswith("do_join") and values and isinstance(values[0], list | tuple):
            glue = values[1] if len(values) > 1 else kwargs.get("d", "")
            _check_growth("join", str(glue), values[:1])
        return function(*args, **kwargs)

    return guarded


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for trainers; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON as Hugging Face offers it; Jinja's own filter would escape for HTML. A call's arguments keep their spelling."""
    if isinstance(value, Arguments) and not ensure_ascii and indent is None and separators is None and not sort_keys:
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))
