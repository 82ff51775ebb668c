"""Tools and thinking, from a request to `message.tool_calls`: a real model, through LLM, the client, raw frames and batch files."""

import asyncio
import io
import json

import pytest
from job_fakes import read_rows, write_lines
from rollout_kit import RawPeer, in_loop, running
from scripted_model import scripted_model
from typer.testing import CliRunner

from batchgen import LLM, ChatPrompt, EngineConfig, SamplingParams
from batchgen.text.message import MessageParser
from rollout import wire
from rollout.cli import app
from rollout.jobs import EmbeddedBackend, Job, JobConfig, PlainReporter, ServiceBackend
from rollout.node_main import engine_factory

TEMPLATE = """
{%- for tool in tools or [] %}{{- '<|tool|>' + (tool | tojson) }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- raise_exception('this model takes no system message') }}{%- endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>' }}
        {%- for key, value in call.function.arguments.items() %}{{- '<parameter=' + key + '>' ~ value ~ '</parameter>' }}{%- endfor %}
        {{- '</function></tool_call>' }}
    {%- endfor %}
{%- endfor %}
{{- '<|assistant|>' + ('</think>' if enable_thinking is false else '<think>') }}
"""
SCRIPT = ["<think>", "I look", " it up.", "</think>", "<tool_call>", "\n<function=weather>\n", "<parameter=zip>", "3011</parameter>"]
SCRIPT += ["<parameter=days>", "2</parameter>", "\n</function>\n", "</tool_call>"]
HIDDEN = ("<tool_call>", "</tool_call>")
"""Control tokens: in the sampled ids, not in the text."""
PROPERTIES = {"zip": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}}
CHAT = [{"role": "user", "content": "Umbrella?"}]
PARAMS = SamplingParams(max_tokens=40, seed=5)
QUIET = {"enable_thinking": False}
OPTIONS = {"dtype": "float32", "kv_gb": 0.02, "num_threads": 1}
REASONING, CALL = "I look it up.", ("weather", '{"zip": "3011", "days": 2}')
UNTYPED = ("weather", '{"zip": 3011, "days": 2}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return scripted_model(tmp_path_factory.mktemp("scripted"), SCRIPT, TEMPLATE, special=HIDDEN)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, **OPTIONS)


def serving(folder):
    return running(engine_factory(EngineConfig(model=str(folder), **OPTIONS)))


def parts(message) -> tuple[str | None, list[tuple[str, str]]]:
    assert message.content is None
    return message.reasoning_content, [(call.function.name, call.function.arguments) for call in message.tool_calls]


def asked() -> tuple[list, dict]:
    """Prompts that say for themselves what others leave to the call, and what the call says."""
    own = ChatPrompt(messages=CHAT, tools=[], chat_template_kwargs=QUIET)
    return [CHAT, own], {"tools": [WEATHER]}


def test_llm_gives_reasoning_and_typed_calls_and_obeys_the_controls(llm):
    prompts, options = asked()
    first, second = llm.generate(prompts, PARAMS, **options)
    assert first.samples[0].text == "".join(piece for piece in SCRIPT[1:] if piece not in HIDDEN)
    assert first.samples[0].finish_reason == "stop"
    assert parts(first.samples[0].message) == (REASONING, [CALL])
    assert parts(second.samples[0].message) == (None, [UNTYPED])
    assert len(first.prompt_token_ids) > len(second.prompt_token_ids) + 100  # the tool is shown


def test_a_message_with_calls_is_the_next_turns_history(llm):
    message = llm.generate([CHAT], PARAMS, tools=[WEATHER])[0].samples[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    group = llm.generate([[*CHAT, message, result]], PARAMS, tools=[WEATHER])[0]
    shown = llm.engine.tokenizer.decode(group.prompt_token_ids)
    assert f"<think>{REASONING}</think>\n<function=weather><parameter=zip>3011</parameter>" in shown
    assert shown.endswith("</function><|tool|>rain<|assistant|><think>")


@in_loop
async def test_the_client_gets_what_llm_gives(folder, llm):
    prompts, options = asked()
    want = [group.samples[0].message for group in llm.generate(prompts, PARAMS, **options)]
    async with serving(folder) as (_, client):
        groups = await client.generate(prompts, PARAMS, **options)
        assert [group.samples[0].message for group in groups] == want
        handle = await client.submit(CHAT, PARAMS, **options)
        assert (await handle.result()).samples[0].message == want[0]
        async for event in client.stream([CHAT], PARAMS, tokens=False, **options, chat_template_kwargs=QUIET):
            assert parts(event.sample.message) == (None, [CALL])


@in_loop
async def test_the_wire_carries_what_a_foreign_client_needs_to_read_a_message(folder):
    async with serving(folder) as (service, client):
        with RawPeer(service.url) as peer:
            peer.hello()
            await peer.expect("welcome")
            chat, text = {"tools": [WEATHER], "markers": True}, json.dumps(CHAT).encode()
            peer.submit(wire.RequestHead(0, "chat", len(text), 0, 1), params=[{"max_tokens": 40, "chat": chat}], text=text)
            found = {}
            while "sample" not in found:
                results = await peer.expect("results")
                bodies = results["frames"]
                found |= {item["item"]: (item, body) for item, body in zip(results["items"], bodies, strict=True)}
        item, body = found["sample"]
        assert item["thinking_open"] is True
        assert body[-item["marked_bytes"] :].decode() == "".join(SCRIPT[1:])
        parser = MessageParser(client.model.message_format, [WEATHER], item["thinking_open"])
        parser.feed(body[-item["marked_bytes"] :].decode())
        parser.finish()
        assert parts(parser.message) == (REASONING, [CALL])


def line(name: str, **body) -> dict:
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, **body}}


LINES = [
    line("shown", tools=[WEATHER]),
    line("quiet", tools=[WEATHER], chat_template_kwargs=QUIET),
    line("none", tools=[WEATHER], tool_choice="none"),
    line("unknown", chat_template_kwargs={"enable_thinkin": False}),
    line("raises", messages=[{"role": "system", "content": "Be brief."}, *CHAT]),
    line("wrong", tools=["weather"]),
    line("choice", tools=[WEATHER], tool_choice="required"),
]


def check_rows(rows: list[dict]) -> None:
    found = {row["custom_id"]: row for row in rows}
    answers = {name: row["response"]["body"]["choices"][0]["message"] for name, row in found.items() if row["error"] is None}
    assert set(answers) == {"shown", "quiet", "none"}
    assert answers["shown"]["reasoning_content"] == answers["none"]["reasoning_content"] == REASONING
    assert "reasoning_content" not in answers["quiet"]
    for name, arguments in (("shown", CALL[1]), ("quiet", CALL[1]), ("none", UNTYPED[1])):
        assert [call["function"] for call in answers[name]["tool_calls"]] == [{"name": "weather", "arguments": arguments}]
    errors = {name: row["error"] for name, row in found.items() if row["error"] is not None}
    assert {name: error["code"] for name, error in errors.items()} == {
        "unknown": "unknown_template_kwarg", "raises": "chat_template", "wrong": "invalid_request", "choice": "invalid_request",
    }  # fmt: skip
    assert "it reads: enable_thinking" in errors["unknown"]["message"]
    assert "this model takes no system message" in errors["raises"]["message"]
    assert "tools[0] is" in errors["wrong"]["message"] and "tool_choice is 'auto' or 'none'" in errors["choice"]["message"]


async def run(source, output, backend, **fields) -> list[dict]:
    config = JobConfig(input_path=source, output_path=output, sampling={"max_tokens": 40}, **fields)
    await Job(config, backend, PlainReporter(io.StringIO())).run()
    return read_rows(output)


def test_batch_files_carry_tools_controls_and_messages_here(llm, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *LINES)
    check_rows(asyncio.run(run(source, tmp_path / "out.jsonl", EmbeddedBackend(lambda: llm))))


@in_loop
async def test_batch_files_carry_tools_controls_and_messages_over_a_service(folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", *LINES)
    async with serving(folder) as (service, _):
        check_rows(await run(source, tmp_path / "out.jsonl", ServiceBackend(service.url)))


def test_the_command_lines_tools_and_controls_are_for_rows_that_say_nothing(folder, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", {"id": "shown", "messages": CHAT}, {"id": "own", "messages": CHAT, "tools": []})
    output = tmp_path / "out.jsonl"
    defaults = [f"tools={json.dumps([WEATHER])}", f"chat_template_kwargs={json.dumps(QUIET)}"]
    arguments = ["run", str(source), str(output), "--model", str(folder), "--max-tokens", "40", "--kv-gb", "0.02", "--num-threads", "1"]
    done = CliRunner().invoke(app, [*arguments, *(word for default in defaults for word in ("--set", default))])
    assert done.exit_code == 0, done.output
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"] for row in read_rows(output)}
    assert "reasoning_content" not in answers["shown"] | answers["own"]
    assert [answers[name]["tool_calls"][0]["function"]["arguments"] for name in ("shown", "own")] == [CALL[1], UNTYPED[1]]
