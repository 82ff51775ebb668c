"""Tool calls of every format become OpenAI's, typed by the tools' schemas; broken ones stay content; control tokens reach the parser."""

import json

import pytest
from chat_templates import MISTRAL
from chat_templates import tokenizer as template_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from message_samples import SAMPLES, TOOLS, Sample, parts, read
from text_samples import byte_level
from tiktoken_samples import write_folder

from batchgen.chat import check_messages
from batchgen.text import kimi_k3
from batchgen.text.control import format_for, marker_tokens, opens_thinking
from batchgen.text.message import Message, MessageParser
from batchgen.text.parsers.formats import FORMATS, HARMONY, TAG_FORMATS, tokens_of
from batchgen.text.parsers.values import ToolSchemas
from batchgen.text.prompts import prompt_ids
from batchgen.text.stream import TextStream
from batchgen.text.tokenizer import Tokenizer

WITH_CALLS = {name: sample for name, sample in SAMPLES.items() if sample.calls}
D = "｜DSML｜"
QWEN = "<tool_call>\n<function=run>\n{}</function>\n</tool_call>"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_every_familys_text_is_read_as_its_format_says(sample: Sample):
    message = read(sample)
    assert message.reasoning_content == sample.reasoning
    assert message.content == sample.content
    assert calls(message) == list(sample.calls)
    if sample.ids is not None:
        assert [call.id for call in message.tool_calls] == list(sample.ids)


@pytest.mark.parametrize("sample", WITH_CALLS.values(), ids=WITH_CALLS.keys())
def test_a_message_can_be_part_of_the_next_prompt(sample: Sample):
    (checked,) = check_messages([read(sample).as_openai()])
    assert [(call.function.name, call.function.arguments) for call in checked.tool_calls] == list(sample.calls)


def test_a_message_and_its_deltas_have_openais_shape():
    parser = MessageParser("hermes", TOOLS, thinking_open=True, call_prefix="call_7_")
    deltas = [delta.as_openai() for delta in parts(parser, ['Hm</think>Hi<tool_call>{"name": "run"}</tool_call>'])]
    call = {"id": "call_7_0", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    assert deltas == [{"reasoning_content": "Hm"}, {"content": "Hi"}, {"tool_calls": [{"index": 0, **call}]}]
    assert parser.message.as_openai() == {"role": "assistant", "content": "Hi", "reasoning_content": "Hm", "tool_calls": [call]}
    assert read(Sample(fmt="hermes", text="Hi")).as_openai() == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "run", "arguments": \n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "run", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "run", "arguments": {"x": 1e999}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "run", "arguments": {"x": NaN}}\n</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
        ("hermes", "<tool_call>" + "9" * 10_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("qwen3_coder", QWEN.format("<parameter=a>\n1\n</parameter>\nand more\n")),
        ("qwen3_coder", "<tool_call>\nno function\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call></tool_call>"),
        ("glm", "<tool_call>run<arg_key>a</arg_key></tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="">\n</invoke>\n</minimax:tool_call>'),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ("deepseek_v32", f'<{D}function_calls>\n<{D}invoke name="run">\nx</{D}invoke>\n</{D}function_calls>'),
        ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {}}, {"name": "run"'),
        ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {}}, {"name": "run", "arguments": 1}]'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]run"),
        ("mistral", "[TOOL_CALLS]run[ARGS]{"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>run:0<|tool_call_end|><|tool_calls_section_end|>"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'),
        ("gpt_oss", "<|channel|>commentary to=functions.run <|constrain|>json<|message|>{<|call|>"),
    ],
)
def test_a_malformed_call_stays_content_exactly_as_written(fmt, text):
    assert read(Sample(fmt=fmt, text=text)) == Message(content=text)
    assert read(Sample(fmt=fmt, text=text), list(text)) == Message(content=text)


@pytest.mark.parametrize("sample", WITH_CALLS.values(), ids=WITH_CALLS.keys())
def test_a_call_that_breaks_off_is_content_and_those_before_it_stay_calls(sample: Sample):
    call_id = read(sample).tool_calls[-1].function.name
    at = sample.text.rindex(call_id) + len(call_id)
    message = read(Sample(fmt=sample.fmt, text=sample.text[:at], open=sample.open))
    assert calls(message) == list(sample.calls[:-1])
    assert message.content is not None and message.content.endswith(call_id)


def test_a_good_call_after_a_broken_one_is_still_a_call():
    good = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    for broken in ('<tool_call>{"name": "x}</tool_call>', "<tool_call>{", "<tool_call>x</tool_call>"):
        message = read(Sample(fmt="hermes", text=broken + good))
        assert calls(message) == [("run", "{}")]
        assert message.content == broken


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        ("hermes", '<tool_call>{"name": "run", "arguments": {"code": "\\"</tool_call>\\\\"}}</tool_call>'),
        ("qwen3_coder", QWEN.format('<parameter=code>\n"</tool_call>\\\n</parameter>\n')),
        ("glm", '<tool_call>run<arg_key>code</arg_key><arg_value>"</tool_call>\\</arg_value></tool_call>'),
    ],
)
def test_closing_tags_inside_values_are_values(fmt, text):
    (call,) = read(Sample(fmt=fmt, text=text)).tool_calls
    assert json.loads(call.function.arguments) == {"code": '"</tool_call>\\'}


def test_forgotten_closing_tags_lose_no_call():
    for fmt, text in (
        ("qwen3_coder", "<function=run>\n<parameter=code>\na\n</parameter>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=run>\n<parameter=code>\na\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=run>\n<parameter=code>\na\n</function>\n</tool_call>"),
        ("kimi_k2", '<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{"code": "a"}<|tool_calls_section_end|>'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>run<｜tool▁sep｜>{"code": "a"}'),
        ("hermes", '<tool_call>\n{"name": "run", "arguments": {"code": "a"}}'),
    ):
        message = read(Sample(fmt=fmt, text=text))
        assert [json.loads(arguments) for _, arguments in calls(message)] == [{"code": "a"}], text
    twice = '<tool_call>\n{"name": "run"}\n<tool_call>\n{"name": "run"}\n</tool_call>'
    assert len(read(Sample(fmt="hermes", text=twice)).tool_calls) == 2


def test_content_between_and_after_calls_is_kept():
    text = 'One\n<tool_call>{"name": "run"}</tool_call>\nTwo\n<tool_call>{"name": "run"}</tool_call>\n'
    message = read(Sample(fmt="hermes", text=text))
    assert (message.content, len(message.tool_calls)) == ("One\n\nTwo", 2)


def test_ids_of_calls_differ_within_a_message():
    call = "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = read(Sample(fmt="kimi_k2", text=f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"))
    assert [call.id for call in message.tool_calls] == ["functions.run:0", "call_1"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{a: 1}", "{a: 1}"),
        ({"items": {}}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/number"}, "1", 1),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"type": "string", "nullable": True}, "null", None),
        ({}, "5", 5),
        ({}, "five", "five"),
        ("nonsense", "5", 5),
    ],
)
def test_a_value_has_the_type_that_its_schema_names(schema, text, value):
    parameters = {"properties": {"x": schema}, "$defs": {"number": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    typed = ToolSchemas([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).typed("f", "x", text)
    assert typed == value and type(typed) is type(value)


@given(tools=json_values, text=st.text(max_size=8))
def test_no_schema_however_odd_raises(tools, text):
    for shape in ([tools], [{"function": {"name": "f", "parameters": {"properties": {"x": tools}}}}], [{"name": "f", "parameters": tools}]):
        ToolSchemas(shape).typed("f", "x", text)


@given(
    arguments=st.dictionaries(st.text("abc_", min_size=1, max_size=4), json_values, max_size=3),
    content=st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=8),
)
def test_what_kimi_k3s_renderer_writes_is_read_back(arguments, content):
    call = {"type": "function", "function": {"name": "run", "arguments": arguments}}
    turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [call]}
    segments = kimi_k3.render([turn], None, False, {"thinking": True})
    text = "".join(segment.name if isinstance(segment, kimi_k3.Token) else segment for segment in segments)
    _, _, text = text.partition("<|open|>think<|sep|>")
    message = read(Sample(fmt="kimi_k3", text=text, open=True))
    assert (message.content or "", message.reasoning_content) == (content, "Hm.")
    assert [json.loads(text) for _, text in calls(message)] == [arguments]


def test_kimi_k3s_arguments_may_be_one_json_element():
    text = '<|open|>tools<|sep|><|open|>call tool="run" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
    assert calls(read(Sample(fmt="kimi_k3", text=text + "<|close|>call<|sep|>"))) == [("run", '{"a": 1}')]


def test_a_llama_answer_is_calls_as_far_as_it_begins_with_them_and_only_with_tools():
    call = '{"name": "run", "parameters": {"code": "}"}}'
    for text, rest in ((call, None), (f"\n {call}\n", None), (f"{call} So.", "So."), (f'{call}; {{"name": "ru', '{"name": "ru')):
        message = read(Sample(fmt="llama3", text=text), list(text))
        assert (calls(message), message.content) == ([("run", '{"code": "}"}')], rest)
        assert read(Sample(fmt="llama3", text=text, tools=[])).content == text
    for text in ('{"name": "run", "parameters": {}, "age": 3}', '{"name": "run"}', "{", "{}", "[]", '{"a": 1}' + call, "So: " + call):
        assert read(Sample(fmt="llama3", text=text), list(text)) == Message(content=text)


def test_llamas_text_comes_at_once_unless_it_may_be_a_call():
    parser = MessageParser("llama3", TOOLS)
    assert parser.feed(" <|") == [] and parser.feed("pyth")[:1] == []
    assert [delta.content for delta in parser.feed("!") + parser.feed(" {")] == [" <|pyth!", " {"]


def test_a_mistral_list_holds_several_calls_whose_ids_its_templates_take():
    text = '[TOOL_CALLS] [{"name": "run", "arguments": {"code": "]"}}, {"name": "run", "arguments": "{}"}]'
    message = read(Sample(fmt="mistral", text=text), list(text))
    assert calls(message) == [("run", '{"code": "]"}'), ("run", "{}")] and message.content is None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "so"} for call in message.tool_calls]
    one = template_tokenizer(MISTRAL)
    shown = one.decode(prompt_ids(one, [{"role": "user", "content": "hi"}, message, *results], None, {}))
    assert all(f'"id": "{call.id}"' in shown and len(call.id) == 9 for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_model_is_told_by_its_template_and_without_one_by_its_type():
    for template, fmt in (
        ("<tool_call>\n{{ tool_call.arguments | tojson }}</tool_call>", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<｜tool▁calls▁begin｜>...```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁sep｜>", "deepseek_v31"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|channel|>analysis", "gpt_oss"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
    ):
        assert format_for("llama", template) == fmt
    assert [format_for(kind, None) for kind in ("kimi_k3", "deepseek_v32", "qwen3_moe", "gpt_oss", "olmoe")] == [
        "kimi_k3",
        "deepseek_v32",
        "hermes",
        "gpt_oss",
        "plain",
    ]


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_prompt_opens_the_reasoning_only_with_its_last_words(fmt):
    opening = "<|channel|>analysis<|message|>" if fmt == HARMONY else TAG_FORMATS[fmt].think[0]
    assert opens_thinking(fmt, f"What is this? {opening}\n")
    assert not opens_thinking(fmt, f"What is {opening} for?")
    assert not opens_thinking(fmt, "")


def tokenizer_with(names: list[str]) -> Tokenizer:
    """A byte-level tokenizer with control tokens of these names."""
    spec = json.loads(json.dumps(byte_level()))
    first = max([entry["id"] for entry in spec["added_tokens"]] + list(spec["model"]["vocab"].values())) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known = {entry["content"] for entry in spec["added_tokens"]}
    new = [name for name in sorted(names) if name not in known]
    spec["added_tokens"] += [{"id": first + at, "content": name, **flags} for at, name in enumerate(new)]
    return Tokenizer(spec)


@pytest.mark.parametrize("sample", WITH_CALLS.values(), ids=WITH_CALLS.keys())
def test_control_tokens_are_shown_to_the_parser_and_hidden_in_the_text(sample: Sample):
    tokenizer = tokenizer_with(list(tokens_of(sample.fmt)))
    ids = [*tokenizer.encode(sample.text, parse_special=True), *tokenizer.encode("<|im_end|>", parse_special=True)]
    shown = tokenizer.control_tokens(marker_tokens(sample.fmt))
    assert shown and set(shown) <= tokenizer.special_ids
    assert tokenizer.decode(ids, show=shown) == sample.text
    stream, parser = TextStream(tokenizer, show=shown), MessageParser(sample.fmt, TOOLS, sample.open)
    for token_id in ids:
        parser.feed(stream.push([token_id]).text)
    parser.feed(stream.finish())
    parser.finish()
    assert parser.message == read(sample)
    plain = TextStream(tokenizer)
    plain.push(ids)
    plain.finish()
    assert plain.text == tokenizer.decode(ids) != sample.text


def test_only_tokens_that_would_be_hidden_are_control_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "kimi"))
    shown = tokenizer.control_tokens(marker_tokens("kimi_k3"))
    assert list(shown.values()) == [b"<|end_of_msg|>"]  # in that folder the others are no special tokens: shown anyway
    assert tokenizer.decode(list(shown), show=shown) == "<|end_of_msg|>" and tokenizer.decode(list(shown)) == ""


def test_stop_strings_match_shown_tokens():
    tokenizer = tokenizer_with(["</tool_call>"])
    ids = tokenizer.encode("ab</tool_call>cd", parse_special=True)
    shown = tokenizer.control_tokens(["</tool_call>"])
    stream = TextStream(tokenizer, ["</tool_call>"], include_stop=True, show=shown)
    assert stream.push(ids).stop_match == "</tool_call>" and stream.text == "ab</tool_call>"
    assert TextStream(tokenizer, ["</tool_call>"]).push(ids).stop_match is None


def test_numbers_in_arguments_are_the_models_own():
    text = '<tool_call>{"name": "run", "arguments": {"x": 12345678901234567890, "y": 1.50, "z": "é\\u00e9"}}</tool_call>'
    ((_, arguments),) = calls(read(Sample(fmt="hermes", text=text)))
    assert json.loads(arguments) == {"x": 12345678901234567890, "y": 1.5, "z": "éé"}
