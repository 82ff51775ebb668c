"""Lines of a batch file become requests, or error rows that say what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from job_fakes import write_lines

from rollout.jobs import batch_file
from rollout.jobs.batch_file import BadRow, BatchFile, Row, parse_line, with_id
from rollout.jobs.errors import JobRefused
from rollout.jobs.sampling_fields import canonical
from rollout.jobs.scan import scan

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse(value: Any, **defaults: Any) -> Row | BadRow:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(7, raw, canonical(defaults))


def row(value: Any, **defaults: Any) -> Row:
    parsed = parse(value, **defaults)
    assert isinstance(parsed, Row), parsed
    return parsed


def bad(value: Any, **defaults: Any) -> str:
    parsed = parse(value, **defaults)
    assert isinstance(parsed, BadRow), parsed
    return parsed.message


def chat(**body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "hi"}
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [message], **body}}


def test_openai_chat_and_completion_lines_are_requests() -> None:
    parsed = row(chat(max_completion_tokens=5, temperature=0, n=3, stop="x", seed=9, logprobs=True, top_logprobs=2, logit_bias={"5": 1}))
    assert (parsed.custom_id, parsed.kind, parsed.prompt) == ("a", "chat", [{"role": "user", "content": "hi"}])
    assert (parsed.params.max_tokens, parsed.params.temperature, parsed.params.n, parsed.params.seed) == (5, 0, 3, 9)
    assert (parsed.params.stop, parsed.params.logprobs, parsed.params.logit_bias) == (["x"], 2, {5: 1})
    assert parsed.want_logprobs
    completion = row({"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2], "logprobs": 0}})
    assert (completion.kind, completion.prompt, completion.want_logprobs, completion.params.logprobs) == ("completion", [1, 2], True, 0)


def test_plain_prompts_messages_ids_and_bare_strings_are_requests() -> None:
    assert row({"prompt": "p", "id": 3, "max_tokens": 2}).custom_id == "3"
    assert row({"prompt_token_ids": [1, 2]}).prompt == [1, 2]
    assert row({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}).prompt == [
        {"role": "user", "content": "ab"}
    ]
    assert row(b'"just text"').prompt == "just text"
    assert row({"prompt": "p", "metadata": {"answer": 3 << 80}}).metadata == {"answer": 3 << 80}


def test_rows_without_an_id_get_the_same_id_every_time_and_different_ones_on_other_lines() -> None:
    ids = [parse_line(line, b'"x"', {}).custom_id for line in (1, 2, 1)]
    assert ids[0] == ids[2] != ids[1]


def test_a_rows_own_fields_win_over_command_line_defaults() -> None:
    assert row({"prompt": "p", "max_tokens": 3}, max_tokens=9, top_p=0.5).params.max_tokens == 3
    assert row({"prompt": "p", "max_completion_tokens": 3}, max_tokens=9).params.max_tokens == 3
    assert row({"prompt": "p", "max_tokens": None}, max_tokens=9, top_p=0.5).params.max_tokens == 9
    assert row({"prompt": "p", "logprobs": False}, logprobs=4).want_logprobs is False


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"prompt": "p", "temprature": 1}, "'temprature'"),
        (chat(verbosity="high"), "'verbosity'"),
        ({"prompt": "p", "return_routed_experts": True}, "'return_routed_experts'"),
        ({**chat(), "extra": 1}, "'extra'"),
        (chat(stream=True), "stream"),
        (chat(temperature=-1), "temperature"),
        (chat(n=0), "n is an integer from 1"),
        (chat(n="3"), "$.n"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(logit_bias={"x": 1}), "logit_bias"),
        (chat(max_tokens=1, max_completion_tokens=2), "give one"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]), "not text"),
        (chat(messages=[{"role": "user", "content": "x", "tool_calls": 3}]), "tool_calls is a list"),
        (chat(messages=[{"role": "user", "content": "x", "weight": 1}]), "unknown field `weight`"),
        (chat(tools="f"), "tools is a list"),
        (chat(tools=[TOOL, TOOL]), "both named 'f'"),
        (chat(tools=[TOOL], tool_choice="required"), "tool_choice is 'auto' or 'none'"),
        (chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}), "none can be required"),
        (chat(tools=[TOOL], parallel_tool_calls=False), "parallel_tool_calls"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs is an object"),
        (chat(chat_template_kwargs={"messages": []}), "cannot set 'messages'"),
        (chat(chat_template_kwargs={"reasoning_effort": "low"}, reasoning_effort="high"), "give one"),
        ({"prompt": "p", "tools": [TOOL]}, "tools go with chat messages"),
        ({"prompt_token_ids": [1], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs go with chat messages"),
        (b'{"prompt": "p", "metadata": ' + b"[" * 33 + b"]" * 33 + b"}", "32 levels"),
        ({"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {"prompt": "p"}}, "POST"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "p"}}, "/v1/embeddings"),
        ({"url": "/v1/completions", "body": {"prompt": "p"}}, "custom_id is missing"),
        ({"custom_id": "", "prompt": "p"}, "custom_id"),
        ({"custom_id": "x" * 513, "prompt": "p"}, "512"),
        ({"custom_id": "a", "id": "b", "prompt": "p"}, "both"),
        ({"prompt": "p", "messages": []}, "exactly one"),
        ({"id": 1}, "exactly one"),
        ({"prompt": ""}, "non-empty"),
        ({"prompt": ["a", "b"]}, "one line for each"),
        ({"prompt": [1 << 70]}, "token ids"),
        ({"prompt_token_ids": "x"}, "list of integers"),
        ([1, 2], "JSON object or a string"),
        (b'{"prompt": "p", "temperature": NaN}', "NaN"),
        (b'{"prompt": "p"', "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b'{"prompt": "p", "seed": 18446744073709551616}', "seed"),
    ],
)
def test_a_line_that_cannot_be_a_request_says_which_field_is_wrong(value: Any, says: str) -> None:
    assert says in bad(value)


def test_bom_crlf_and_blank_lines_are_accepted_and_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf"a"\r\n\r\n  \n"b"\r\n"c"')
    assert list(BatchFile(path)) == [(1, b'"a"'), (4, b'"b"'), (5, b'"c"')]


def test_a_line_over_the_limit_is_one_error_row_and_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 20)
    path = write_lines(tmp_path / "in.jsonl", b'"' + b"x" * 18 + b'"', b'"' + b"x" * 100 + b'"', b'"after"')
    lines = list(BatchFile(path))
    assert [(number, raw is None) for number, raw in lines] == [(1, False), (2, True), (3, False)]
    assert parse_line(2, None, {}).code == "line_too_long"


def test_digest_covers_every_byte_of_over_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 20)
    digests = set()
    for ending in (b"x", b"y"):
        file = BatchFile(write_lines(tmp_path / "in.jsonl", b'"' + b"x" * 100 + ending + b'"'))
        list(file)
        digests.add(file.digest())
    assert len(digests) == 2


def test_duplicate_ids_are_refused_naming_both_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, {"id": 1, "prompt": "x"}, {"custom_id": "1", "prompt": "y"})
    with pytest.raises(JobRefused, match=r"lines 2 and 3 .* '1'"):
        scan(BatchFile(path), {})


def test_scan_finds_rows_that_repeat_prompt_and_sampling(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "in.jsonl",
        "x",
        {"prompt": "y"},
        {"prompt": "x", "n": 2},
        b'{"prompt":  "x"}',
        {"prompt": "y", "max_tokens": 128},
        b"{",
        b"{",
    )
    found = scan(BatchFile(path), {})
    assert (found.num_rows, found.num_bad, found.num_duplicates) == (7, 2, 2)
    assert found.examples() == [(1, 4), (2, 5)]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobRefused, match="no rows"):
        scan(BatchFile(write_lines(tmp_path / "in.jsonl", b"", b"  ")), {})


def test_failed_lines_carry_their_id_when_fed_back() -> None:
    assert json.loads(with_id(b'"p"', "line-1")) == {"custom_id": "line-1", "prompt": "p"}
    assert json.loads(with_id(b'{"prompt": "p", "id": null}', "line-1")) == {"custom_id": "line-1", "prompt": "p"}
    assert with_id(b'{"prompt": "p", "id": 5}', "5") == b'{"prompt": "p", "id": 5}'
    assert with_id(b"not json", "x") == b"not json"


def test_tools_and_template_controls_belong_to_a_chat() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    body = {"messages": [{"role": "user", "content": "x"}, *turns], "tools": [TOOL], "reasoning_effort": "low", "tool_choice": "auto"}
    asked = row(chat(**body)).prompt
    assert asked.tools == [TOOL] and asked.chat_template_kwargs == {"reasoning_effort": "low"}
    assert asked.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls} and asked.messages[2]["tool_call_id"] == "c"
    assert row(chat(tools=[TOOL], tool_choice="none", parallel_tool_calls=True)).prompt == row(chat()).prompt


def test_a_rows_own_tools_and_controls_win_over_the_jobs() -> None:
    defaults = canonical({"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}})
    plain = parse_line(1, json.dumps(chat()).encode(), defaults)
    assert plain.prompt.tools == [TOOL] and plain.prompt.chat_template_kwargs == {"enable_thinking": False}
    own = parse_line(1, json.dumps(chat(tools=[], chat_template_kwargs={"a": 1})).encode(), defaults)
    assert own.prompt.tools == [] and own.prompt.chat_template_kwargs == {"a": 1}
    assert isinstance(parse_line(1, b'"text"', defaults), BadRow)


def test_rows_with_other_tools_or_controls_are_not_duplicates() -> None:
    bodies = [{}, {"tools": [TOOL]}, {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 2}}]
    assert len({row(chat(**body)).key() for body in bodies}) == 4
    assert row(chat(tools=[TOOL])).key() == row(chat(tools=[TOOL], tool_choice="auto")).key()
