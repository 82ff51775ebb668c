"""`Sample.message`: read in the model's format with the request's tools and the markers that `text` hides, here and over the service."""

import pickle

import msgspec
import pytest
from chat_templates import DEEPSEEK_V31, GLM45, GPT_OSS, HARMONY_TOKENS, PLAIN, QWEN3, tokenizer
from fake_engine import FakeEngine
from rollout_kit import in_loop, running
from test_text_kimi_k3 import FIRST, folder

from batchgen import LLM, SamplingParams
from batchgen.chat import ChatPrompt
from batchgen.errors import ErrorInfo
from batchgen.outputs import Group, Sample
from batchgen.text.prompts import prompt_ids
from batchgen.text.replies import Replies
from batchgen.text.tokenizer import Tokenizer
from rollout.jobs.batch_file import parse_line
from rollout.jobs.results import result_row

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}}
USER = [{"role": "user", "content": "hi"}]
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
GLM_CALL = (
    "so</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>"
    "<arg_key>days</arg_key><arg_value>12</arg_value>\n</tool_call>"
)


def sample(one: Tokenizer, written: str, text: str | None = None, **fields) -> Sample:
    """What the engine gives for a text of the model's."""
    ids = one.encode(written, add_special_tokens=False, parse_special=True)
    values = {"index": 0, "finish_reason": "stop", "seed": 255, "weights_versions": [], "logprobs": [0.0] * len(ids), "token_ids": ids}
    return Sample(**(values | fields), text=one.decode(ids) if text is None else text)


def read(one: Tokenizer, got: Sample, prompt=USER, tools=None, **kwargs) -> dict | None:
    Replies(one, prompt_ids(one, prompt, tools, kwargs), tools).attach(got)
    return got.message and got.message.as_openai()


def test_reasoning_is_found_whether_the_model_or_the_prompt_opens_it():
    expected = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    one = tokenizer(QWEN3)
    assert read(one, sample(one, "<think>\n2 and 2\n</think>\n\n4")) == expected
    assert read(one, sample(one, "4"), enable_thinking=False) == {"role": "assistant", "content": "4"}
    one = tokenizer(DEEPSEEK_V31)
    assert read(one, sample(one, "2 and 2</think>4"), thinking=True) == expected
    assert read(one, sample(one, "4")) == {"role": "assistant", "content": "4"}


def test_calls_are_typed_by_the_requests_tools_and_named_by_the_seed():
    one = tokenizer(GLM45)
    message = read(one, sample(one, "<think>" + GLM_CALL), tools=[TOOL])
    call = {"id": "call_00000000000000ff_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "12", "days": 12}'}}
    assert message == {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]}


def test_markers_that_the_text_hides_are_shown_to_the_parser_and_only_those():
    one = tokenizer(GPT_OSS, HARMONY_TOKENS)
    got = sample(one, HARMONY)
    assert got.text == "analysishmassistantfinalyes"
    assert read(one, got) == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    qwen = tokenizer(QWEN3)
    assert read(qwen, sample(qwen, "yes<|im_end|>")) == {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("kept", range(len("analysishmassistantfinalyes")))
def test_a_text_cut_at_a_stop_string_is_read_up_to_the_cut(kept):
    one = tokenizer(GPT_OSS, HARMONY_TOKENS)
    whole = sample(one, HARMONY).text
    got = sample(one, HARMONY, text=whole[:kept])
    read(one, got)
    shown = got.reply.text
    for name in HARMONY_TOKENS:
        shown = shown.replace(name, "")
    assert shown == whole[:kept] and HARMONY.startswith(got.reply.text)


def test_kimi_k3_reads_what_it_writes(tmp_path):
    one = Tokenizer.from_folder(folder(tmp_path))
    written = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    got = sample(one, written)
    assert FIRST + 3 in got.token_ids and "<|" not in got.text
    message = read(one, got, tools=[TOOL])
    assert (message["content"], message["reasoning_content"]) == ("ok", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"days": 2}'}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
    again = prompt_ids(one, [*USER, got.message, result], [TOOL], {})
    start = len(prompt_ids(one, USER, [TOOL], {}))
    assert again[start : start + len(got.token_ids)] == got.token_ids


def test_plain_models_and_other_prompts_have_plain_content_and_errors_none():
    one = tokenizer(PLAIN)
    assert read(one, sample(one, "a<|b")) == {"role": "assistant", "content": "a<|b"}
    assert read(one, sample(one, "more"), prompt="text") == {"role": "assistant", "content": "more"}
    assert read(one, sample(one, "more"), prompt=[5, 6]) == {"role": "assistant", "content": "more"}
    failed = sample(one, "", finish_reason="error", error=ErrorInfo(code="x", message="y"))
    assert read(one, failed) is None
    bare = sample(one, "x")
    Replies(None, [1]).attach(bare)
    assert bare.message is None


def test_a_message_is_parsed_once_and_survives_pickling():
    one = tokenizer(QWEN3)
    got = sample(one, "<think>a</think>b")
    read(one, got)
    assert got.message is got.message
    assert pickle.loads(pickle.dumps(got)).message == got.message


def test_llm_gives_messages_to_every_prompt():
    llm = LLM("batchgen/assets/tiny-moe")
    groups = llm.generate([USER, "Calculate 1 + 1.", [5, 6], []], SamplingParams(max_tokens=8))
    for group in groups[:3]:
        assert group.samples[0].message.content == group.samples[0].text
    assert groups[3].samples[0].message is None
    assert llm.engine.facts.message_format == "hermes"  # a Qwen3 without a word of its own


class Scripted(FakeEngine):
    """Says the same text to every prompt."""

    def __init__(self, one: Tokenizer, written: str):
        super().__init__()
        self.tokenizer = one
        self.facts = msgspec.structs.replace(self.facts, message_format=one.message_format)
        self.written = written

    def _finish(self, running, reason, error=None):
        event = super()._finish(running, reason, error)
        said = sample(self.tokenizer, self.written)
        event.sample.token_ids, event.sample.logprobs, event.sample.text = said.token_ids, said.logprobs, said.text
        return event


@in_loop
async def test_the_services_samples_have_the_same_messages():
    params = SamplingParams(max_tokens=1, seed=3)
    glm = tokenizer(GLM45.replace("else '' }}", "else '<think>' }}"))
    async with running(lambda: Scripted(glm, GLM_CALL)) as (_, client):
        assert client.model.message_format == "glm"
        own = ChatPrompt(messages=USER, tools=[TOOL])
        first, second, third = await client.generate([own, USER, [5, 6]], params)
        got = first.samples[0].message
        assert got.reasoning_content == "so" and got.tool_calls[0].function.arguments == '{"city": "12", "days": 12}'
        assert second.samples[0].message.tool_calls[0].function.arguments == '{"city": 12, "days": 12}'
        assert third.samples[0].message.content.startswith("so</think>")
        local = sample(glm, GLM_CALL, seed=first.samples[0].seed)
        read(glm, local, tools=[TOOL])
        assert local.message == got
    harmony = tokenizer(GPT_OSS, HARMONY_TOKENS)
    async with running(lambda: Scripted(harmony, HARMONY)) as (_, client):
        async for event in client.stream([USER], params, tokens=False):
            assert event.sample.text == "analysishmassistantfinalyes"
            assert event.sample.message.as_openai() == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


@in_loop
async def test_a_service_whose_nodes_know_no_format_gives_none():
    async with running() as (_, client):
        assert (await client.generate([USER], SamplingParams(max_tokens=1)))[0].samples[0].message is None


def test_a_jobs_chat_rows_carry_the_message():
    one = tokenizer(GLM45)
    got = sample(one, "<think>" + GLM_CALL)
    read(one, got, tools=[TOOL])
    row = parse_line(1, b'{"messages": [{"role": "user", "content": "hi"}]}', {})
    group = Group(request_id="r", prompt_token_ids=[1], samples=[got], logprobs_mode="processed")
    made = result_row(row, group, FakeEngine().facts, engine_version="0", created=0, attempts=1, seconds=0.0)
    message = made.response.body.choices[0].message
    assert message == got.message.as_openai() and message["tool_calls"][0]["function"]["name"] == "weather"
