"""Kimi-K3's chat format: the text of the public format, structure only from us, and loud failure on the wrong tokenizer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_samples import config, plain_ids, ranks, write_folder

from batchgen.chat import ChatPrompt
from batchgen.errors import ModelError, RequestError
from batchgen.text.prompts import prompt_ids
from batchgen.text.tokenizer import Tokenizer

FIRST = len(ranks())
NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 255: "[PAD]"}
USER = [{"role": "user", "content": "hi"}]
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your thinking channel '
    "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`.<|close|>message<|sep|><|end_of_msg|>"
)
HI = '<|open|>message role="user"<|sep|>hi<|close|>message<|sep|><|end_of_msg|>'
THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def folder(path, names=NAMES, **model):
    added = {str(FIRST + at): {"content": name, "special": True} for at, name in names.items()}
    write_folder(path, **(config() | {"added_tokens_decoder": added}))
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "eos_token_id": FIRST + 1} | model))
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(folder(tmp_path_factory.mktemp("k3")))


def shown(ids: list[int]) -> str:
    """The ids as text, structural tokens by name."""
    names = {FIRST + at: name.encode() for at, name in NAMES.items()}
    pieces = {rank: token for token, rank in ranks().items()} | names
    return b"".join(pieces[one] for one in ids).decode()


def prompt(tokenizer, messages=USER, tools=None, **kwargs) -> str:
    return shown(prompt_ids(tokenizer, ChatPrompt(messages=messages, tools=tools, chat_template_kwargs=kwargs), None, {}))


def test_a_chat_opens_the_channel_that_the_controls_say(tokenizer):
    assert prompt(tokenizer) == EFFORT.format("max") + HI + THINK
    assert prompt(tokenizer, thinking_effort="low") == prompt(tokenizer, reasoning_effort="low") == EFFORT.format("low") + HI + THINK
    assert prompt(tokenizer, thinking_effort=None) == HI + THINK
    answer = HI + THINK.replace("think", "response")
    assert (
        prompt(tokenizer, thinking=False)
        == prompt(tokenizer, enable_thinking=False)
        == prompt(tokenizer, reasoning_effort="none")
        == answer
    )


def test_turns_calls_and_results_are_elements(tokenizer):
    calls = [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "f", "arguments": '{"s": "x<y", "n": 1.5, "b": true, "z": null, "l": [1, "é"]}'},
        },
        {"id": "b", "function": {"name": 'g&"h', "arguments": '{"broken": '}},
    ]
    messages = [
        {"role": "system", "content": "be", "name": "policy"},
        *USER,
        {"role": "assistant", "reasoning_content": "hm", "content": "ok", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
    ]
    expected = (
        '<|open|>message role="system" name="policy"<|sep|>be<|close|>message<|sep|><|end_of_msg|>' + HI + THINK + "hm<|close|>think<|sep|>"
        "<|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>x<y<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|>'
        '<|open|>argument key="b" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        '<|open|>argument key="z" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>[1, "é"]<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="g&amp;&quot;h" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"broken": <|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="f" index="1"<|sep|>first<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="tool" tool="g&amp;&quot;h" index="2"<|sep|>second<|close|>message<|sep|><|end_of_msg|>' + THINK
    )
    assert prompt(tokenizer, messages, thinking_effort=None) == expected


def test_tools_and_choices_are_system_messages(tokenizer):
    tools = '[{"function":{"name":"weather","parameters":{"type":"object"}},"type":"function"}]'
    declared = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in JSONSchema.\n\n'
        f"```json\n{tools}\n```<|close|>message<|sep|><|end_of_msg|>"
    )
    assert prompt(tokenizer, tools=[WEATHER]) == declared + EFFORT.format("max") + HI + THINK
    required = prompt(tokenizer, tools=[WEATHER], tool_choice="required")
    assert 'type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.' in required
    assert prompt(tokenizer, tool_choice="auto") == prompt(tokenizer)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}}
    assert '```json\n{"a":2,"b":1}\n```<|close|>' in prompt(tokenizer, response_format=schema)


def test_each_piece_of_text_is_encoded_for_itself(tokenizer):
    ids = prompt_ids(tokenizer, ChatPrompt(messages=USER, chat_template_kwargs={"thinking_effort": None}), None, {})
    text = [plain_ids(piece) for piece in ("message", ' role="', "user", '"', "hi", "message")]
    begin = [FIRST + 3, *text[0], *text[1], *text[2], *text[3], FIRST + 5, *text[4], FIRST + 4, *text[5], FIRST + 5, FIRST + 2]
    assert ids[: len(begin)] == begin


@given(parts=st.lists(st.one_of(st.sampled_from([*NAMES.values(), '"', "&quot;", "<|", "\n"]), st.text(max_size=3)), max_size=6))
def test_no_text_of_a_users_becomes_structure(tokenizer, parts):
    hostile = "".join(parts).encode("utf-8", "replace").decode()

    def structure(text: str) -> list[int]:
        call = {"id": text, "function": {"name": text, "arguments": json.dumps({text: text})}}
        messages = [
            {"role": "user", "content": text, "name": "n" + text},
            {"role": "assistant", "content": text, "reasoning_content": "r" + text, "tool_calls": [call]},
            {"role": "tool", "name": "t" + text, "content": text},
        ]
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        return [one for one in prompt_ids(tokenizer, ChatPrompt(messages=messages, tools=[tool]), None, {}) if one >= FIRST]

    assert structure(hostile) == structure("x")


@pytest.mark.parametrize(
    ("messages", "kwargs", "reason"),
    [
        ([{"role": "critic", "content": "x"}], {}, "role 'critic'"),
        ([{"role": "tool", "content": "x"}], {}, "answers no call"),
        (USER, {"thinking_effort": "medium"}, "thinking_effort is one of low, high, max"),
        (USER, {"thinking": "yes"}, "thinking is true or false"),
        (USER, {"thinking": True, "enable_thinking": False}, "give one of them"),
        (USER, {"thinking": True, "reasoning_effort": "none"}, "give one of them"),
        (USER, {"tool_choice": "weather"}, "tool_choice is"),
        (USER, {"response_format": "xml"}, "response_format is"),
        (USER, {"response_format": "json_schema"}, "response_format json_schema is"),
        (USER, {"temperature": 1}, "has no 'temperature'"),
    ],
)
def test_what_the_format_does_not_have_is_refused(tokenizer, messages, kwargs, reason):
    with pytest.raises(RequestError, match=reason):
        prompt(tokenizer, messages, **kwargs)


def test_tokenizer_files_of_another_kimi_fail_at_loading(tmp_path):
    wrong = NAMES | {2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 5: "<|start_header_id|>"}
    with pytest.raises(ModelError, match=r"kimi_k3.*has no <\|open\|> <\|close\|> <\|sep\|> <\|end_of_msg\|>"):
        Tokenizer.from_folder(folder(tmp_path, wrong))


def test_the_format_is_chosen_by_model_type_and_only_without_a_template(tmp_path):
    one = Tokenizer.from_folder(folder(tmp_path))
    assert one.eos_token_ids == [FIRST + 1, FIRST + 2]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert shown(Tokenizer.from_folder(tmp_path).apply_chat_template(USER)) == "hi"
    (tmp_path / "chat_template.jinja").unlink()
    folder(tmp_path, model_type="kimi_linear")
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).apply_chat_template(USER)
