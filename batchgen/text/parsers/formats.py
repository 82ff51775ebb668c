"""The formats by name, and which one a model uses. In: a name, or a model's type and chat template. Out: a parser's facts.

Facts are those of the released chat templates, and for models that ship none (DeepSeek-V3.2, Kimi-K3) of their own renderers.
"""

from typing import Protocol

from batchgen.text.parsers import bare_json, harmony, syntax
from batchgen.text.parsers.events import Event
from batchgen.text.parsers.syntax import DSML
from batchgen.text.parsers.tagged import Guard, TagFormat, TagParser
from batchgen.text.parsers.values import ToolSchemas

_THINK = ("<think>", "</think>")
_DEEPSEEK = {
    "sections": (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    "call": ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "tokens": (
        *_THINK,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
}
_KIMI_K2_TOOLS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)

TAG_FORMATS = {
    "plain": TagFormat(tokens=_THINK),
    "hermes": TagFormat(tokens=(*_THINK, "<tool_call>", "</tool_call>"), call=("<tool_call>", "</tool_call>"), read=syntax.hermes),
    "qwen3_coder": TagFormat(
        tokens=(*_THINK, "<tool_call>", "</tool_call>"),
        sections=(("<tool_call>", "</tool_call>"),),
        call=("<function=", "</function>"),
        guard=Guard(open="<parameter=", close="</parameter>"),
        read=syntax.qwen_xml,
    ),
    "deepseek_v3": TagFormat(read=syntax.deepseek_v3, **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v31": TagFormat(read=syntax.deepseek_v31, **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v32": TagFormat(
        tokens=(*_THINK, DSML),
        sections=tuple((f"<{DSML}{name}>", f"</{DSML}{name}>") for name in ("function_calls", "tool_calls")),
        call=(f'<{DSML}invoke name="', f"</{DSML}invoke>"),
        guard=Guard(open=f"<{DSML}parameter ", close=f"</{DSML}parameter>"),
        read=syntax.dsml,
    ),
    "kimi_k2": TagFormat(
        tokens=(*_THINK, *_KIMI_K2_TOOLS),
        think_ends=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        read=syntax.kimi_k2,
    ),
    "kimi_k3": TagFormat(
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        think_ends=("<|open|>response<|sep|>", "<|open|>tools<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        call=("<|open|>call ", "<|close|>call<|sep|>"),
        guard=Guard(open="<|open|>argument ", close="<|close|>argument<|sep|>"),
        read=syntax.kimi_k3,
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        exact=True,
    ),
    "llama3": TagFormat(tokens=(*_THINK, bare_json.TAG)),
    "mistral": TagFormat(
        tokens=(*_THINK, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        call=("[TOOL_CALLS]", "[/TOOL_CALLS]"),
        read=syntax.mistral,
        short_ids=True,
    ),
    "glm": TagFormat(
        tokens=(*_THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call=("<tool_call>", "</tool_call>"),
        guard=Guard(open="<arg_value>", close="</arg_value>"),
        read=syntax.glm,
    ),
    "minimax_m2": TagFormat(
        tokens=(*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
        call=("<invoke name=", "</invoke>"),
        guard=Guard(open="<parameter name=", close="</parameter>"),
        read=syntax.minimax_xml,
    ),
}
HARMONY = "gpt_oss"
FORMATS = (*TAG_FORMATS, HARMONY)
"""Every format's name."""

# What only one format's template says, the most telling first.
_SIGNS = (
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|open|>", "kimi_k3"),
    ("[TOOL_CALLS]", "mistral"),
    (bare_json.TAG, "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
    ("<|channel|>", HARMONY),
    (DSML, "deepseek_v32"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
)
_MODEL_TYPES = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm",
    "glm5_next": "glm",
    "glm_moe_dsa": "glm",
    "gpt_oss": HARMONY,
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "kimi_linear": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_next": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_5_moe": "qwen3_coder",
}


class TextParser(Protocol):
    """Growing text in, events out."""

    def feed(self, text: str) -> list[Event]:
        """What became certain."""

    def finish(self) -> list[Event]:
        """The rest."""


def check_format(fmt: str) -> None:
    """Raise ValueError unless the format is known."""
    if fmt not in FORMATS:
        raise ValueError(f"message format {fmt!r:.100} is not known; formats: {', '.join(FORMATS)}")


def make_parser(fmt: str, schemas: ToolSchemas, thinking_open: bool) -> TextParser:
    """A parser for one text."""
    check_format(fmt)
    if fmt == HARMONY:
        return harmony.HarmonyParser(schemas, thinking_open)
    kind = bare_json.BareJsonParser if fmt == "llama3" else TagParser
    return kind(TAG_FORMATS[fmt], schemas, thinking_open)


def is_exact(fmt: str) -> bool:
    """Whether white space around reasoning and content is the model's own."""
    return fmt == HARMONY or TAG_FORMATS[fmt].exact


def has_short_ids(fmt: str) -> bool:
    """Whether calls are named by nine letters and digits."""
    return fmt != HARMONY and TAG_FORMATS[fmt].short_ids


def tokens_of(fmt: str) -> tuple[str, ...]:
    """The tokens of which the format's markers are made."""
    check_format(fmt)
    return harmony.TOKENS if fmt == HARMONY else TAG_FORMATS[fmt].tokens


def think_opening(fmt: str) -> str:
    """What opens the reasoning."""
    check_format(fmt)
    return harmony.OPEN_THINK if fmt == HARMONY else TAG_FORMATS[fmt].think[0]


def format_for(model_type: str, template: str | None) -> str:
    """The format a model writes: what its chat template shows it, else what models of its type were trained on, else `plain`."""
    if template:
        if "<｜tool▁calls▁begin｜>" in template and DSML not in template:
            return "deepseek_v3" if "```json" in template else "deepseek_v31"
        for sign, fmt in _SIGNS:
            if sign in template:
                return fmt
    return _MODEL_TYPES.get(model_type, "plain")
