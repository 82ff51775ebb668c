"""Which format a model writes, which tokens it needs to see, and where its prompt left off. In: model facts, prompts. Out: those three.

`skip_special_tokens` hides control tokens in ordinary text, and with them the structure of formats that are built of them. A parser's
text is decoded with those tokens shown, and only those:

    fmt = format_for(model_type, tokenizer.template_source)
    shown = tokenizer.control_tokens(marker_tokens(fmt))
    stream = TextStream(tokenizer, stop, show=shown)
    parser = MessageParser(fmt, tools, opens_thinking(fmt, tokenizer.decode(prompt_ids[-PROMPT_TAIL:], show=shown)))
"""

from batchgen.text.parsers.formats import format_for, think_opening, tokens_of

PROMPT_TAIL = 64
"""So many of a prompt's last tokens hold everything `opens_thinking` looks at."""

__all__ = ["PROMPT_TAIL", "format_for", "marker_tokens", "opens_thinking"]


def marker_tokens(fmt: str) -> frozenset[str]:
    """Names of the tokens the format's parser must see. Raises ValueError for an unknown format."""
    return frozenset(tokens_of(fmt))


def opens_thinking(fmt: str, prompt_text: str) -> bool:
    """Whether the prompt, decoded with the format's tokens shown, ends in opened reasoning. Only its end counts: users may quote tags."""
    return prompt_text.rstrip().endswith(think_opening(fmt))
