"""DeepSeek-V3.2's chat format: the text of its published encoder, its own answers read back, and no structure from a user's text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import byte_level

from batchgen.chat import ChatPrompt
from batchgen.errors import RequestError
from batchgen.text.deepseek_v32 import TOKENS
from batchgen.text.message import MessageParser
from batchgen.text.parsers.syntax import DSML
from batchgen.text.prompts import prompt_ids
from batchgen.text.replies import Replies
from batchgen.text.tokenizer import Tokenizer

B, E, U, A = TOKENS
USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Jetzt, für dich", "parameters": {"type": "object"}}}
CALL = (
    f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Köln</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">2</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>'
)
ARGUMENTS = '{"city": "Köln", "days": 2}'
CALLS = [{"id": "a", "function": {"name": "weather", "arguments": ARGUMENTS}}]
TURN = {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": CALLS}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "rain"}


def make(model_type="deepseek_v32", names=(*TOKENS, DSML), templates=None) -> Tokenizer:
    spec = json.loads(json.dumps(byte_level()))
    first = 1 + max(entry["id"] for entry in spec["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [{"id": first + at, "content": name, "special": name != DSML, **flags} for at, name in enumerate(names)]
    return Tokenizer(spec, {"bos_token": B, "eos_token": E}, chat_templates=templates, guard_added=True, model_type=model_type)


ONE = make()


def prompt(messages=USER, tools=None, **kwargs) -> str:
    ids = prompt_ids(ONE, ChatPrompt(messages=messages, tools=tools, chat_template_kwargs=kwargs), None, {})
    return ONE.decode(ids, show=ONE.control_tokens(TOKENS))


def test_a_chat_thinks_only_when_asked_to_and_under_either_name():
    assert prompt() == prompt(thinking=False) == f"{B}{U}hi{A}</think>"
    assert prompt(thinking=True) == prompt(enable_thinking=True) == f"{B}{U}hi{A}<think>"
    assert prompt([{"role": "system", "content": "Be."}, *USER]) == f"{B}Be.{U}hi{A}</think>"


def test_reasoning_is_shown_for_the_running_turn_and_dropped_before_the_last_question():
    running = [*USER, TURN, RESULT]
    results = "\n\n<function_results>\n<result>rain</result>\n</function_results>\n\n"
    assert prompt(running, thinking=True) == f"{B}{U}hi{A}<think>hm</think>So:\n\n{CALL}{E}{results}<think>"
    assert prompt(running) == f"{B}{U}hi{A}</think>So:\n\n{CALL}{E}{results}</think>"
    answered = [*running, {"role": "assistant", "content": "Wet.", "reasoning_content": "ah"}, *USER]
    shown = f"{B}{U}hi{A}</think>So:\n\n{CALL}{E}{results}</think>Wet.{E}{U}hi{A}<think>"
    assert prompt(answered, thinking=True) == shown


def test_tools_end_the_system_message_in_the_published_words():
    shown = prompt([{"role": "system", "content": "Be."}, *USER], tools=[WEATHER, WEATHER | {"function": {"name": "g"}}])
    assert shown.startswith(f"{B}Be.\n\n## Tools\nYou have access to a set of tools")
    assert f'by writing a "<{DSML}function_calls>" block' in shown
    declared = '{"name": "weather", "description": "Jetzt, für dich", "parameters": {"type": "object"}}\n{"name": "g"}'
    assert shown.endswith(f"<functions>\n{declared}\n</functions>\n{U}hi{A}</think>")
    assert prompt(tools=[WEATHER]).startswith(f"{B}\n\n## Tools\n")


def test_results_come_in_the_order_of_their_calls():
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"]
    turn = {"role": "assistant", "tool_calls": calls}
    given = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    order = "<result>a</result>\n<result>b</result>"
    assert order in prompt([*USER, turn, *given]) and order in prompt([*USER, turn, *given[::-1]])
    nameless = [{"role": "tool", "content": name} for name in "ba"]
    assert "<result>b</result>\n<result>a</result>" in prompt([*USER, turn, *nameless])


def test_without_a_generation_prompt_the_text_ends_with_the_turn():
    assert ONE.decode(ONE.apply_chat_template(USER, add_generation_prompt=False), show=ONE.control_tokens(TOKENS)) == f"{B}{U}hi"


def test_what_it_writes_is_read_back():
    ids = prompt_ids(ONE, USER, [WEATHER], {"thinking": True})
    replies = Replies(ONE, ids, [WEATHER])
    assert (replies.format, replies.thinking_open) == ("deepseek_v32", True)
    parser = MessageParser(replies.format, [WEATHER], replies.thinking_open, call_prefix="x")
    parser.feed(f"hm</think>So:\n\n{CALL}")
    parser.finish()
    message = parser.message
    assert (message.reasoning_content, message.content, message.tool_calls[0].function.arguments) == ("hm", "So:", ARGUMENTS)
    again = [*USER, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    assert prompt(again, thinking=True) == prompt([*USER, TURN, RESULT], thinking=True)


@pytest.mark.parametrize(
    ("messages", "kwargs", "code", "reason"),
    [
        ([{"role": "developer", "content": "x"}], {}, "chat_template", "got 'developer'"),
        ([*USER, {"role": "assistant", "content": "x"}], {"thinking": True}, "chat_template", "reasoning_content or tool_calls"),
        ([*USER, TURN], {"thinking": "yes"}, "invalid_template_kwargs", "true or false, got 'yes'"),
        (USER, {"thinking": True, "enable_thinking": False}, "invalid_template_kwargs", "give one"),
        (USER, {"thinking_effort": "low"}, "unknown_template_kwarg", "'thinking_effort'"),
        ([*USER, RESULT], {}, "chat_template", "1 tool results after a turn with 0 tool calls"),
        ([*USER, TURN, RESULT, RESULT], {}, "chat_template", "2 tool results after a turn with 1 tool calls"),
        ([*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {}, "chat_template", "got '{'"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(messages, kwargs, code, reason):
    with pytest.raises(RequestError) as caught:
        prompt(messages, **kwargs)
    assert caught.value.code == code and reason in caught.value.message


@given(parts=st.lists(st.one_of(st.sampled_from([*TOKENS, DSML, "<think>", "</think>", "<", "｜", "\n"]), st.text(max_size=3)), max_size=6))
def test_no_text_of_a_users_becomes_structure(parts):
    text = "".join(parts)

    def structure(content: str) -> list[int]:
        calls = [{"id": "a", "function": {"name": "f", "arguments": json.dumps({"a": content})}}]
        tool = {"type": "function", "function": {"name": "f", "description": content}}
        said = [{"role": role, "content": content} for role in ("system", "user")]
        turns = [*said, TURN | {"tool_calls": calls, "content": content, "reasoning_content": content + "."}, RESULT | {"content": content}]
        return [one for one in ONE.apply_chat_template(turns, tools=[tool], thinking=True) if one in ONE._control_ids]

    assert structure(text) == structure("x")


def test_the_format_is_for_folders_without_a_template_and_with_its_tokens():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    own = make(templates={"default": template})
    assert own.decode(own.apply_chat_template(USER)) == "hi"
    for other in (make(model_type="deepseek_v3"), make(names=(*TOKENS[:2], DSML))):
        with pytest.raises(RequestError, match="no chat template"):
            other.apply_chat_template(USER)
