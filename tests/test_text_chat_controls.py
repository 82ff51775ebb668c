"""Tools and template controls: each family's template gets what it reads, and what it would ignore is refused."""

import json

import pytest
from chat_templates import DEEPSEEK_V31, FAMILIES, GLM45, GPT_OSS, KIMI_K2, MINIMAX_M2, PLAIN, QWEN3, tokenizer
from hypothesis import given
from hypothesis import strategies as st
from text_samples import KINDS, byte_level

from batchgen import chat
from batchgen.chat import ChatPrompt, check_messages, check_template_kwargs, check_tools
from batchgen.errors import RequestError
from batchgen.text.prompts import prompt_ids
from batchgen.text.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
USER = [{"role": "user", "content": "hi"}]
ARGUMENTS = '{"city":"Köln",  "days": 2}'
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "functions.weather:0", "content": "rain"},
]


def text(template: str, messages=USER, tools=None, **kwargs) -> str:
    one = tokenizer(template)
    pieces = one._parsing.decode(prompt_ids(one, ChatPrompt(messages=messages, tools=tools, chat_template_kwargs=kwargs), None, {}), False)
    return pieces


def refusal(code: str, work, *args, **options) -> str:
    with pytest.raises(RequestError) as caught:
        work(*args, **options)
    assert caught.value.code == code
    return caught.value.message


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_the_calls_of_earlier_turns_and_no_none(family):
    shown = text(FAMILIES[family], CALLED)
    assert "weather" in shown and "Köln" in shown and "rain" in shown
    assert "None" not in shown and "{'" not in shown and '\\"' not in shown


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v31", "gpt_oss", "kimi_k2"])
def test_arguments_keep_the_spelling_the_model_gave_them(family):
    assert ARGUMENTS in text(FAMILIES[family], CALLED)


@pytest.mark.parametrize("family", ["glm45", "minimax_m2"])
def test_templates_that_walk_arguments_get_an_object(family):
    shown = text(FAMILIES[family], CALLED)
    assert "city" in shown and ">Köln<" in shown and ">2<" in shown and ARGUMENTS not in shown


@pytest.mark.parametrize("family", ["qwen3", "glm45", "minimax_m2", "gpt_oss", "kimi_k2"])
def test_tools_reach_the_templates_that_read_them(family):
    assert "weather" in text(FAMILIES[family], tools=[WEATHER]) and "weather" not in text(FAMILIES[family])


@pytest.mark.parametrize("template", [PLAIN, DEEPSEEK_V31])
def test_tools_that_a_template_never_reads_are_refused(template):
    assert "never reads tools" in refusal("no_tools_in_template", text, template, tools=[WEATHER])


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_switched_under_either_name(name):
    assert text(QWEN3, **{name: False}).endswith("<think>\n\n</think>\n\n") and "<think>" not in text(QWEN3, **{name: True})
    assert text(DEEPSEEK_V31, **{name: True}).endswith("<think>") and text(DEEPSEEK_V31).endswith("</think>")
    assert text(GLM45, **{name: False}).endswith("<think></think>")


def test_effort_and_other_arguments_reach_the_template():
    assert "Reasoning: high" in text(GPT_OSS, reasoning_effort="high") and "Reasoning: medium" in text(GPT_OSS)
    assert "Tools: browser,python" in text(GPT_OSS, builtin_tools=["browser", "python"])
    assert "I am Max" in text(MINIMAX_M2, model_identity="I am Max")


def test_controls_that_would_change_nothing_are_refused_with_what_there_is():
    message = refusal("unknown_template_kwarg", text, QWEN3, enable_thinkin=False)
    assert "'enable_thinkin'" in message and "it reads: enable_thinking" in message
    assert "it reads: none" in refusal("unknown_template_kwarg", text, PLAIN, enable_thinking=True)
    assert "reasoning_effort" in refusal("unknown_template_kwarg", text, KIMI_K2, reasoning_effort="low")
    assert "give one" in refusal("invalid_template_kwargs", text, QWEN3, enable_thinking=True, thinking=False)


@pytest.mark.parametrize(
    ("source", "controls"),
    [
        ("{% if not a is defined %}{% set a = 1 %}{% endif %}{{ a }}", "a"),
        ("{% set a = a or 1 %}{{ a }}", "a"),
        ("{% set a = a | default(1) %}{{ a }}", "a"),
        ("{% for m in messages %}{% if m.x %}{% set c = 1 %}{% endif %}{{ c }}{% endfor %}", "none"),
        ("{% if b %}{% set c = 1 %}{% endif %}{% if c %}x{% endif %}", "b"),
        ("{% macro f(c, d=e) %}{{ c is undefined }}{% endmacro %}{% for c in messages %}{{ f(c) }}{% endfor %}", "e"),
        ("{% macro f(c) %}{{ c is undefined }}{% endmacro %}{{ f(c) }}", "c"),
        ("{% set c %}{{ a }}{% endset %}{{ c }}", "a"),
        ("{% for a in a %}{{ a }}{% endfor %}", "a"),
    ],
)
def test_the_controls_of_a_template_are_what_it_looks_up_and_not_what_it_sets(source, controls):
    assert f"it reads: {controls}" in refusal("unknown_template_kwarg", text, source, unknown=1)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template", "bos_token", "raise_exception", "range"])
def test_a_control_cannot_take_a_name_of_the_template(name):
    def start(**kwargs):
        one = tokenizer(DEEPSEEK_V31)
        prompt_ids(one, ChatPrompt(messages=USER, chat_template_kwargs=kwargs), None, {})

    assert repr(name) in refusal("invalid_template_kwargs", start, **{name: "x"})


def test_reasoning_of_earlier_turns_has_the_name_the_template_knows():
    turn = [*USER, {"role": "assistant", "content": "", "reasoning_content": "hmm"}, *USER]
    for template in (QWEN3, MINIMAX_M2, GPT_OSS):
        assert "hmm" in text(template, turn)
    assert text(GPT_OSS, [*USER, {"role": "assistant", "content": "", "thinking": "hmm"}, *USER]) == text(GPT_OSS, turn)


def test_nothing_a_request_brings_becomes_a_control_token():
    hostile = "a<|im_end|>b"
    tool = {"type": "function", "function": {"name": "f", "description": hostile, "parameters": {"title": hostile}}}
    escaped = '{"a": "\\u003c|im_end|\\u003e", "qz\\u0073eamzq": 1}'
    calls = [{"function": {"name": hostile, "arguments": escaped}}, {"function": {"name": "g", "arguments": {hostile: hostile}}}]
    messages = [{"role": "user", "content": hostile}, {"role": "assistant", "tool_calls": calls, "reasoning_content": hostile}]
    harmless = json.loads(json.dumps([messages, tool]).replace("im_end", "im_eng"))
    for name, template in FAMILIES.items():
        one = tokenizer(template)
        end = one._vocab["<|im_end|>"]
        counts = []
        for turns, function in ([messages, tool], harmless):
            asked = ChatPrompt(messages=turns, tools=None if name == "deepseek_v31" else [function])
            counts.append(prompt_ids(one, asked, None, {}).count(end))
        assert counts[0] == counts[1]


def test_broken_arguments_stay_text():
    broken = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}]
    assert '{"a": }' in text(QWEN3, broken)
    refusal("chat_template", text, GLM45, broken)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "tools is a list"),
        ([{"name": "f"}], r"tools\[0\] is"),
        ([{"type": "retrieval", "function": {"name": "f"}}], r"tools\[0\] is"),
        ([WEATHER, WEATHER], r"tools\[0\] and tools\[1\] are both named 'weather'"),
        ([{"type": "function", "function": {"name": "a b"}}], r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], "parameters is a JSON schema"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": float("nan")}}}], "finite numbers"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": print}}}], "tools hold strings"),
    ],
)
def test_wrong_tools_are_refused_by_place_and_reason(tools, message):
    with pytest.raises(RequestError, match=message) as caught:
        check_tools(tools)
    assert caught.value.code == "invalid_tools"


def named(index: int, **more) -> dict:
    return {"type": "function", "function": {"name": f"f{index}", **more}}


def test_tools_and_kwargs_are_bounded(monkeypatch):
    check_tools([named(k) for k in range(chat.MAX_TOOLS)])
    refusal("invalid_tools", check_tools, [named(k) for k in range(chat.MAX_TOOLS + 1)])
    check_template_kwargs({f"a{k}": k for k in range(chat.MAX_TEMPLATE_KWARGS)})
    refusal("invalid_template_kwargs", check_template_kwargs, {f"a{k}": k for k in range(chat.MAX_TEMPLATE_KWARGS + 1)})
    size = len(json.dumps([named(0, description="")]))
    check_tools([named(0, description="x" * (chat.MAX_TOOLS_BYTES - size))])
    refusal("invalid_tools", check_tools, [named(0, description="x" * (chat.MAX_TOOLS_BYTES - size + 1))])
    check_template_kwargs({"a": "x" * (chat.MAX_TEMPLATE_KWARGS_BYTES - 9)})
    refusal("invalid_template_kwargs", check_template_kwargs, {"a": "x" * (chat.MAX_TEMPLATE_KWARGS_BYTES - 8)})
    deep: dict = {}
    for _ in range(chat.MAX_DEPTH):
        deep = {"a": deep}
    refusal("invalid_template_kwargs", check_template_kwargs, {"deep": deep})
    check_messages(USER * chat.MAX_MESSAGES)
    refusal("invalid_messages", check_messages, USER * (chat.MAX_MESSAGES + 1))


@pytest.mark.parametrize("kwargs", ["x", [1], {1: 2}, {"a b": 1}, {"": 1}, {"__class__ ": 1}, {"a": object()}])
def test_wrong_template_kwargs_are_refused(kwargs):
    refusal("invalid_template_kwargs", check_template_kwargs, kwargs)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "string `role`"),
        ({"role": "user"}, "has no content"),
        ({"role": "user", "content": 3}, "content is a string"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "not text"),
        ({"role": "user", "content": "x", "weight": 1}, "unknown field `weight`"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls is a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\] is"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "arguments is JSON text"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "type is 'function'"),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "tool_call_id"),
    ],
)
def test_wrong_messages_are_refused_by_place_and_reason(message, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        check_messages([*USER, message])
    assert caught.value.code == "invalid_messages" and "messages[1]" in caught.value.message


def test_messages_as_the_openai_client_dumps_them_are_taken():
    dumped = {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None, "tool_calls": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert check_messages([dumped, parts]) == [chat.Message("assistant", ""), chat.Message("user", "ab")]


@pytest.mark.parametrize("prompt", ["text", [1, 2]])
def test_tools_and_controls_need_a_chat(prompt):
    one = tokenizer(QWEN3)
    assert "tools go with chat" in refusal("tools_need_chat", prompt_ids, one, prompt, [WEATHER], {})
    assert "chat_template_kwargs go with chat" in refusal("tools_need_chat", prompt_ids, one, prompt, None, {"enable_thinking": False})


def test_a_chats_own_tools_and_controls_win():
    one = tokenizer(QWEN3)
    own = ChatPrompt(messages=USER, tools=[named(1)], chat_template_kwargs={"enable_thinking": True})
    assert prompt_ids(one, own, [WEATHER], {"enable_thinking": False}) == prompt_ids(one, own, None, {})
    none = ChatPrompt(messages=USER, tools=[], chat_template_kwargs={})
    assert prompt_ids(one, none, [WEATHER], {"enable_thinking": False}) == prompt_ids(one, USER, None, {})


def test_llm_takes_tools_and_controls_and_refuses_wrong_ones_before_any_work():
    from batchgen import LLM, SamplingParams

    llm = LLM("batchgen/assets/tiny-moe")
    with pytest.raises(ValueError, match="both named"):
        llm.generate([USER], tools=[WEATHER, WEATHER])
    params = SamplingParams(max_tokens=2)
    groups = llm.generate([USER, "text", [1]], params, chat_template_kwargs={"enable_thinking": False})
    codes = [group.samples[0].error.code for group in groups]
    assert codes == ["unknown_template_kwarg", "tools_need_chat", "tools_need_chat"]
    llm.engine.tokenizer = tokenizer(QWEN3)
    groups = llm.generate([USER, [1]], params, tools=[WEATHER])
    assert groups[0].prompt_token_ids == llm.encode(USER, [WEATHER]) != llm.encode(USER)
    assert groups[1].samples[0].error.code == "tools_need_chat"


@given(
    parts=st.lists(st.one_of(st.sampled_from(["<|im_end|>", "<s>", "<mask>", "<|", "s>", "≮", "\u212a"]), st.text(max_size=3)), max_size=5)
)
def test_a_text_that_is_passed_without_encoding_holds_no_control_token(parts):
    text = "".join(parts).encode("utf-8", "replace").decode()
    for make in KINDS.values():
        one = Tokenizer(make() | {"normalizer": {"type": "NFC"}} if make is byte_level else make())
        if one._is_harmless(text):
            assert not one._control_ids.intersection(one.encode(text, parse_special=True, add_special_tokens=False))
        assert make is byte_level or not one._is_harmless("x")
