"""What models of each family write. In: nothing. Out: texts, and the messages they are, written down by hand from the published formats."""

from dataclasses import dataclass, field

from batchgen.text.message import MessageParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "zip": {"type": "string"},
                    "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}}},
]
WEATHER = '{"city": "Köln", "days": 3, "exact": true, "zip": "050667", "where": {"lat": 50.9}, "tags": ["a", "b"]}'
"""The arguments that most samples hold."""
CODE = 'if a < b:\n    print("</x>", \'"\')'


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    fmt: str
    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments) of each call."""
    ids: tuple[str, ...] | None = None
    open: bool = False
    """Whether the prompt ends inside the reasoning."""
    tools: list = field(default_factory=lambda: TOOLS)


def parts(parser: MessageParser, pieces: list[str]) -> list:
    """All deltas of a text that arrives in pieces."""
    deltas = []
    for piece in pieces:
        deltas += parser.feed(piece)
    return deltas + parser.finish()


def read(sample: Sample, pieces: list[str] | None = None):
    parser = MessageParser(sample.fmt, sample.tools, sample.open)
    parts(parser, [sample.text] if pieces is None else pieces)
    return parser.message


_D = "｜DSML｜"
_XML = [
    ("city", "Köln"),
    ("days", "3"),
    ("exact", "true"),
    ("zip", "050667"),
    ("where", '{"lat": 50.9}'),
    ("tags", '["a", "b"]'),
]
_QWEN = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _XML)
_GLM = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _XML)
_MINIMAX = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in _XML)
_DSML = "".join(
    f'<{_D}parameter name="{key}" string="{"true" if key in ("city", "zip") else "false"}">{value}</{_D}parameter>\n' for key, value in _XML
)
_K3_TYPES = {"city": "string", "days": "number", "exact": "boolean", "zip": "string", "where": "object", "tags": "array"}
_K3 = "".join(f'<|open|>argument key="{key}" type="{_K3_TYPES[key]}"<|sep|>{value}<|close|>argument<|sep|>' for key, value in _XML)
_CODE_JSON = '{"code": "if a < b:\\n    print(\\"</x>\\", \'\\"\')"}'

SAMPLES = {
    "plain": Sample(fmt="plain", text=" Hello.\n", content=" Hello.\n"),
    "plain_think": Sample(fmt="plain", text="<think>\nOne.\n\nTwo.\n</think>\n\nHello.\n", reasoning="One.\n\nTwo.", content="Hello.\n"),
    "open_think": Sample(fmt="plain", text="One.\n</think>\n\nHello.", reasoning="One.", content="Hello.", open=True),
    "open_think_twice": Sample(fmt="plain", text="\n<think>\nOne.\n</think>\n\nHello.", reasoning="One.", content="Hello.", open=True),
    "hermes": Sample(
        fmt="hermes",
        text=f'<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "run", "arguments": {_CODE_JSON}}}\n</tool_call>',
        reasoning="Hm.",
        content="Let me see.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        ids=("call_0", "call_1"),
    ),
    "qwen3_coder": Sample(
        fmt="qwen3_coder",
        text=f"Hm.\n</think>\n\n<tool_call>\n<function=get_weather>\n{_QWEN}</function>\n</tool_call>\n"
        f"<tool_call>\n<function=run>\n<parameter=code>\n{CODE}\n</parameter>\n</function>\n</tool_call>",
        reasoning="Hm.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        open=True,
    ),
    "deepseek_r1": Sample(
        fmt="deepseek_v3",
        text="Hm.\n</think>\n\nI ask.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{WEATHER}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{_CODE_JSON}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        open=True,
    ),
    "deepseek_v31": Sample(
        fmt="deepseek_v31",
        text="I ask.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{WEATHER}<｜tool▁call▁end｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>{_CODE_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
    ),
    "deepseek_v32": Sample(
        fmt="deepseek_v32",
        text=f'Hm.</think>I ask.\n\n<{_D}function_calls>\n<{_D}invoke name="get_weather">\n{_DSML}</{_D}invoke>\n'
        f'<{_D}invoke name="run">\n<{_D}parameter name="code" string="true">{CODE}</{_D}parameter>\n</{_D}invoke>\n</{_D}function_calls>',
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        open=True,
    ),
    "deepseek_v4": Sample(
        fmt="deepseek_v32",
        text=f'<{_D}tool_calls>\n<{_D}invoke name="get_weather">\n{_DSML}</{_D}invoke>\n</{_D}tool_calls>',
        calls=(("get_weather", WEATHER),),
    ),
    "llama3": Sample(
        fmt="llama3",
        text=f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "run", "parameters": {_CODE_JSON}}}',
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
    ),
    "llama3_tag": Sample(
        fmt="llama3",
        text=f'<think>Hm.</think>\n\n<|python_tag|>{{"type": "function", "name": "run", "parameters": {_CODE_JSON}}}',
        reasoning="Hm.",
        calls=(("run", _CODE_JSON),),
    ),
    "mistral": Sample(
        fmt="mistral",
        text=f'I ask.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}, "id": "aB3dE6gH9"}}]',
        content="I ask.",
        calls=(("get_weather", WEATHER),),
        ids=("aB3dE6gH9",),
    ),
    "mistral_later": Sample(
        fmt="mistral",
        text=f"<think>Hm.</think>I ask.[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{WEATHER}[TOOL_CALLS]run[ARGS]{_CODE_JSON}",
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        ids=("aB3dE6gH9", "1549bbd55"),
    ),
    "kimi_k2": Sample(
        fmt="kimi_k2",
        text="<think>Hm.</think>I ask.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{WEATHER}<|tool_call_end|><|tool_call_begin|>functions.run:1<|tool_call_argument_begin|>"
        f"{_CODE_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        ids=("functions.get_weather:0", "functions.run:1"),
    ),
    "kimi_k25_call_ends_reasoning": Sample(
        fmt="kimi_k2",
        text="Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>"
        f"{_CODE_JSON}<|tool_call_end|><|tool_calls_section_end|>",
        reasoning="Hm.",
        calls=(("run", _CODE_JSON),),
        ids=("functions.run:0",),
        open=True,
    ),
    "kimi_k3": Sample(
        fmt="kimi_k3",
        text="Hm.\n<|close|>think<|sep|><|open|>response<|sep|> I ask.<|close|>response<|sep|><|open|>tools<|sep|>"
        f'<|open|>call tool="get_weather" index="1"<|sep|>{_K3}<|close|>call<|sep|><|open|>call tool="run" index="2"<|sep|>'
        f'<|open|>argument key="code" type="string"<|sep|>{CODE}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>",
        reasoning="Hm.\n",
        content=" I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        open=True,
    ),
    "kimi_k3_response": Sample(
        fmt="kimi_k3", text="Hello.\n<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", content="Hello.\n"
    ),
    "glm": Sample(
        fmt="glm",
        text=f"\n<think>Hm.</think>\nI ask.\n<tool_call>get_weather\n{_GLM}</tool_call>"
        f"<tool_call>run<arg_key>code</arg_key><arg_value>{CODE}</arg_value></tool_call>",
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
    ),
    "minimax_m2": Sample(
        fmt="minimax_m2",
        text=f'Hm.\n</think>\n\nI ask.\n<minimax:tool_call>\n<invoke name="get_weather">\n{_MINIMAX}</invoke>\n'
        f'<invoke name="run">\n<parameter name="code">{CODE}</parameter>\n</invoke>\n</minimax:tool_call>',
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
        open=True,
    ),
    "gpt_oss": Sample(
        fmt="gpt_oss",
        text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}<|call|>"
        f"<|start|>assistant to=functions.run<|channel|>commentary json<|message|>{_CODE_JSON}<|call|>",
        reasoning="Hm.",
        content="I ask.",
        calls=(("get_weather", WEATHER), ("run", _CODE_JSON)),
    ),
    "gpt_oss_final": Sample(
        fmt="gpt_oss",
        text="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.\n<|return|>",
        reasoning="Hm.\nYes.",
        content="Hello.\n",
    ),
}
