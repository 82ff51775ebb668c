"""Request fields as users write them. In: a JSON object's fields besides the prompt. Out: Wishes. Never imports torch."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from batchgen.chat import check_template_kwargs, check_tools
from batchgen.sampling_params import SamplingParams

SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__) - {"return_routed_experts"}
OUR_FIELDS = frozenset({"max_completion_tokens", "top_logprobs", "return_token_ids", "stream", "model", "user"})
"""Accepted besides SamplingParams' own names. `model` and `user` are labels: the result row names the model that answered."""
CHAT_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"})
"""Accepted with messages. `reasoning_effort` is short for the template kwarg of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How one row is sampled and what its result carries."""

    params: SamplingParams
    want_logprobs: bool
    want_token_ids: bool
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def canonical(fields: dict[str, Any]) -> dict[str, Any]:
    """One spelling for every wish: null means unset, aliases are renamed. ValueError names the first unknown or unusable field."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in SAMPLING_FIELDS and name not in OUR_FIELDS and name not in CHAT_FIELDS:
            known = ", ".join(sorted(SAMPLING_FIELDS | OUR_FIELDS | CHAT_FIELDS))
            raise ValueError(f"unknown sampling field {name!r} (your own data belongs in metadata); known: {known}")
    if given.pop("stream", False) is not False:
        raise ValueError("stream is not possible in a batch file; remove the field")
    given.pop("model", None)
    given.pop("user", None)
    if "max_completion_tokens" in given:
        limit = given.pop("max_completion_tokens")
        if given.setdefault("max_tokens", limit) != limit:
            raise ValueError(f"max_completion_tokens is {limit!r} and max_tokens is {given['max_tokens']!r}; give one of them")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if "logprobs" in given or "top_logprobs" in given:
        given["want_logprobs"], given["logprobs"] = _logprobs(given.get("logprobs", False), given.pop("top_logprobs", 0))
    if not isinstance(given.get("return_token_ids", False), bool):
        raise ValueError(f"return_token_ids is true or false, got {given['return_token_ids']!r:.100}")
    return _chat(given)


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    """Tools and template controls: checked, aliases renamed, what cannot be promised refused."""
    if given.pop("parallel_tool_calls", True) is not True:
        raise ValueError("parallel_tool_calls is only possible as true: how many calls a model makes is not constrained")
    choice = given.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ValueError(f"tool_choice is 'auto' or 'none': calls are not constrained, so none can be required, got {choice!r:.100}")
    if "tools" in given:
        given["tools"] = check_tools(given["tools"]) or []
    if choice == "none":
        given["tools"] = []
    if "reasoning_effort" in given:
        effort = given.pop("reasoning_effort")
        kwargs = given.setdefault("chat_template_kwargs", {})
        if isinstance(kwargs, dict):
            if kwargs.get("reasoning_effort", effort) != effort:
                raise ValueError(
                    f"reasoning_effort is {effort!r:.50} and in chat_template_kwargs {kwargs['reasoning_effort']!r:.50}; give one"
                )
            given["chat_template_kwargs"] = {**kwargs, "reasoning_effort": effort}
    if "chat_template_kwargs" in given:
        given["chat_template_kwargs"] = check_template_kwargs(given["chat_template_kwargs"])
    return given


def _logprobs(wanted: Any, top: Any) -> tuple[bool, int]:
    """OpenAI's two spellings: chat's `logprobs: true, top_logprobs: k` and completions' `logprobs: k`."""
    if type(top) is not int or (top and wanted is False):
        raise ValueError(f"top_logprobs is an integer and needs logprobs: true, got {top!r:.100} with logprobs {wanted!r:.100}")
    if isinstance(wanted, bool):
        return wanted, top
    if type(wanted) is not int:
        raise ValueError(f"logprobs is true, false or an integer, got {wanted!r:.100}")
    return True, max(wanted, top)


def wishes(defaults: dict[str, Any], row: dict[str, Any]) -> Wishes:
    """A row's own fields over the defaults, both in `canonical` form. ValueError says which value is out of range."""
    merged = {**defaults, **row}
    want_logprobs = merged.pop("want_logprobs", False)
    want_token_ids = merged.pop("return_token_ids", False)
    tools = merged.pop("tools", None) or None
    template_kwargs = merged.pop("chat_template_kwargs", {})
    try:
        params = msgspec.convert(merged, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return Wishes(params=params, want_logprobs=want_logprobs, want_token_ids=want_token_ids, tools=tools, template_kwargs=template_kwargs)
