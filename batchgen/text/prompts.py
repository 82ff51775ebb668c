"""Prompts to token ids. In: token ids, text, messages or a ChatPrompt, and a tokenizer. Out: ids. Never imports torch."""

from collections.abc import Iterable
from typing import Any, Protocol

from batchgen.chat import ChatPrompt, Message, check_messages, check_template_kwargs, check_tools, template_message
from batchgen.errors import RequestError
from batchgen.sampling_params import SamplingParams

Prompt = list[int] | str | list[dict[str, Any]] | list[Message] | ChatPrompt
"""Token ids, text, chat messages, or a chat with tools and template controls of its own."""


class ChatTokenizer(Protocol):
    """What is needed of a Tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, **variables: Any) -> list[int]: ...


def as_list(prompts: Iterable[Prompt]) -> list[Prompt]:
    """ValueError for a single prompt: it is an iterable of prompts by accident only."""
    listed = [] if isinstance(prompts, str | ChatPrompt) else list(prompts)
    if isinstance(prompts, str | ChatPrompt) or (listed and all(isinstance(one, int | dict | Message) for one in listed)):
        raise ValueError(f"prompts is a list of prompts, got a single one; wrap it in a list: {prompts!r:.100}")
    return listed


def params_of_each(prompts: list[Prompt], params: SamplingParams | list[SamplingParams] | None) -> list[SamplingParams]:
    """One SamplingParams for each prompt. ValueError when the numbers differ, TypeError for what are none."""
    each = params if isinstance(params, list) else [SamplingParams() if params is None else params] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(each)} sampling params; give one for all or one for each")
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise TypeError(f"params is a SamplingParams, or a list with one for each prompt, got {wrong!r:.100}")
    return each


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is messages or a ChatPrompt."""
    return isinstance(prompt, ChatPrompt) or (isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict | Message))


def prompt_ids(tokenizer: ChatTokenizer | None, prompt: Any, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]) -> list[int]:
    """The ids of a prompt. `tools` and `kwargs`, checked, are for a chat that says nothing itself. RequestError for what cannot be one."""
    if not is_chat(prompt):
        if tools or kwargs:
            raise misplaced(prompt, "tools" if tools else "chat_template_kwargs")
        ids = _ids(prompt)
        if ids is not None:
            return ids
        if not isinstance(prompt, str):
            message = f"a prompt is a list of token ids, text or chat messages, got {prompt!r:.100}"
            raise RequestError(message, code="invalid_prompt")
    if tokenizer is None:
        raise RequestError("the model folder has no tokenizer, so only token ids can be served; give ids", code="no_tokenizer")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, ChatPrompt):
        tools = tools if prompt.tools is None else check_tools(prompt.tools)
        kwargs = kwargs if prompt.chat_template_kwargs is None else check_template_kwargs(prompt.chat_template_kwargs)
        prompt = prompt.messages
    messages = [template_message(message) for message in check_messages(prompt)]
    return tokenizer.apply_chat_template(messages, tools=tools, **kwargs)


def _ids(prompt: Any) -> list[int] | None:
    """A list of ids from a list, a tuple, an array or a tensor of integers; None for anything else."""
    if isinstance(prompt, str):
        return None
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    return list(ids) if isinstance(ids, list | tuple) and set(map(type, ids)) <= {int} else None


def tools_of(prompt: Any, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools a prompt is shown: its own, else the call's."""
    return prompt.tools or None if isinstance(prompt, ChatPrompt) and prompt.tools is not None else tools


def misplaced(prompt: Any, what: str) -> RequestError:
    """The refusal of tools or template kwargs with a prompt that nothing would put them into."""
    kind = "text" if isinstance(prompt, str) else "token ids"
    return RequestError(f"{what} go with chat messages: nothing puts them into a prompt of {kind}", code="tools_need_chat")
