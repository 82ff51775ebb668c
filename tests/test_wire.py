"""What crosses the wire comes out as it went in; everything else is a ProtocolError."""

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_engine import fake_facts
from hypothesis import given
from hypothesis import strategies as st

from batchgen.chat import ChatPrompt, FunctionCall, Message, ToolCall
from batchgen.errors import ErrorInfo
from batchgen.events import EngineStats, PromptScored, SampleFinished, SampleProgress
from batchgen.outputs import Sample
from batchgen.sampling_params import SamplingParams
from rollout import admin_wire, wire
from rollout.batches import (
    Asked,
    Batch,
    decode_asked,
    decode_chat,
    decode_ids,
    decode_params,
    encode_ids,
    encode_params,
    prompt_length,
    split,
)
from rollout.calls import encode_prompt
from rollout.errors import ProtocolError
from rollout.results import check_body, pack_progress, pack_prompt, pack_sample, unpack_progress, unpack_prompt, unpack_sample

DECODER = wire.HeaderDecoder(wire.ToService | wire.ToClient | wire.ToNode)
ERROR = ErrorInfo(code="x", message="y")
SESSION = "0123456789abcdef" * 2
MESSAGES = [
    wire.Hello(version=1, session=SESSION),
    wire.NodeHello(version=1, session=SESSION, model=fake_facts(), weights_version=3, window=8),
    wire.Welcome(version=1, service=SESSION, heartbeat_s=2.0, timeout_s=9.0, credits=5, model=fake_facts()),
    wire.Ping(sent=1.5),
    wire.Pong(sent=1.5, step_age_s=0.5, stats=EngineStats(finished={"stop": 2})),
    wire.Bye(error=ERROR),
    wire.Drain(),
    wire.Submit(requests=[wire.RequestHead(0, "ids", 3, 0, (1 << 64) - 1, 2.5, True)]),
    wire.Accept(requests=[1, 2]),
    wire.Reject(requests=[1], error=ERROR, retry_after_s=0.5),
    wire.Cancel(requests=[4]),
    wire.Ack(seq=4, floor=2),
    wire.Assign(parts=[wire.AssignHead(0, "text", 3, 0, 7, [(0, 4), (6, 7)])]),
    wire.Abort(parts=[1]),
    wire.Results(seq=1, items=[wire.ProgressItem(request=1, index=0, start=0, num_tokens=2, text_bytes=2)]),
    wire.Query(call=1, what="health"),
    wire.Answer(call=1),
    wire.Control(op="pause"),
    wire.Weights(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message):
    assert DECODER.decode(wire.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_unknown_field_is_refused_in_every_message(message):
    fields = msgspec.msgpack.decode(wire.encode(message)) | {"surprise": 1}
    with pytest.raises(ProtocolError, match="surprise"):
        DECODER.decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"type": "exec", "code": "1"},
        {"type": "hello", "version": 1, "session": "../../etc/passwd"},
        {"type": "hello", "version": "1", "session": SESSION},
        {"type": "ack", "seq": -1},
        {"type": "ping", "sent": "now"},
        {"type": "submit", "requests": [[0, "pickle", 1, 0, 0]]},
        {"type": "submit", "requests": [[0, "ids", 1, 0, -5]]},
        {"type": "submit", "requests": [[0, "ids", 1, 0, 0, float("nan")]]},
        {"type": "submit", "requests": [[0, "ids", 1, 0, 0, 0.0, False, "more"]]},
        {"type": "assign", "parts": [[0, "ids", 1, 0, 0, [[0, 0]]]]},
        {"type": "query", "call": 1, "what": "__class__"},
        [1, 2, 3],
        None,
    ],
)
def test_headers_that_are_not_in_the_protocol_are_refused(header):
    with pytest.raises(ProtocolError):
        DECODER.decode(msgspec.msgpack.encode(header))


def test_a_bomb_of_nested_arrays_is_refused_without_being_built():
    with pytest.raises(ProtocolError):
        DECODER.decode(b"\x91" * 60_000)


@given(st.binary(max_size=300))
def test_no_bytes_make_a_decoder_raise_anything_but_protocol_error(data: bytes):
    for decoder in (DECODER, wire.HeaderDecoder(admin_wire.ToAdmin)):
        with contextlib.suppress(ProtocolError):
            decoder.decode(data)


def sample(**changes: Any) -> Sample:
    values: dict[str, Any] = {
        "index": 2, "token_ids": [5, 6, 7], "logprobs": [-0.5, -1.25, -2.0], "text": "añ€😀", "finish_reason": "stop", "stop_match": "x",
        "detail": "clamped", "seed": (1 << 64) - 1, "weights_versions": [(1, 0, 2), (2, 2, 3)], "error": None,
    }  # fmt: skip
    return Sample(**(values | changes))


def through_the_wire(one: Sample) -> Sample:
    item, body = pack_sample(9, SampleFinished(request_id="r", sample=one, num_cached_tokens=4), "raw")
    header = wire.encode(wire.Results(seq=1, items=[item]))
    (item,) = DECODER.decode(header).items
    assert (item.request, item.cached_tokens, item.logprobs_mode) == (9, 4, "raw")
    check_body(item, body)
    return unpack_sample(item, body)


@pytest.mark.parametrize(
    "one",
    [
        sample(),
        sample(token_ids=[], logprobs=[], text="", weights_versions=[], finish_reason="error", error=ERROR, stop_match=None),
        sample(stop_match=17, top_logprobs=[{5: -0.5, 1: -1.0}, {6: -1.25}, {7: -2.0, 3: -3.0}]),
    ],
    ids=["plain", "error", "top"],
)
def test_a_sample_comes_out_as_it_went_in(one):
    assert through_the_wire(one) == one


def test_routed_experts_come_out_as_they_went_in():
    experts = np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)
    out = through_the_wire(sample(routed_experts=experts)).routed_experts
    assert out is not None and out.dtype == np.int16 and np.array_equal(out, experts)


@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 1), st.floats(-1e4, 0, width=32)), max_size=20), st.text(max_size=20))
def test_any_tokens_and_text_come_out_as_they_went_in(pairs, text):
    one = sample(token_ids=[i for i, _ in pairs], logprobs=[p for _, p in pairs], text=text.encode("utf-8", "replace").decode())
    assert through_the_wire(one) == one


def test_progress_and_prompt_come_out_as_they_went_in():
    event = SampleProgress(request_id="r", index=1, start=4, token_ids=[1, 2], logprobs=[-0.5, -1.0], text="ab")
    item, body = pack_progress(3, event)
    assert (item.start, unpack_progress(item, body)) == (4, ([1, 2], [-0.5, -1.0], "ab"))
    item, body = pack_prompt(3, [7, 8], None)
    assert unpack_prompt(item, body) == ([7, 8], None, None)
    scored = PromptScored(request_id="r", prompt_logprobs=[None, -0.5], prompt_top_logprobs=[{}, {8: -0.5, 1: -2.0}])
    item, body = pack_prompt(3, [7, 8], scored)
    assert unpack_prompt(item, body) == ([7, 8], [None, -0.5], [{}, {8: -0.5, 1: -2.0}])


@pytest.mark.parametrize("change", [-1, 1, 4])
def test_a_body_that_is_not_as_long_as_its_item_says_is_refused(change):
    item, body = pack_sample(0, SampleFinished(request_id="", sample=sample()), "raw")
    bad = body[:change] if change < 0 else body + b"\0" * change
    for check in (check_body, unpack_sample):
        with pytest.raises(ProtocolError, match="bytes"):
            check(item, bad)


def test_a_sample_with_more_spans_than_the_wire_takes_becomes_an_error_sample():
    spans = [(k, k, k + 1) for k in range(2000)]
    item, body = pack_sample(0, SampleFinished(request_id="", sample=sample(weights_versions=spans)), "raw")
    assert unpack_sample(item, body).error.code == "result_too_large"


def test_a_batch_of_prompts_comes_out_as_it_went_in():
    prompts = [[1, 2, 3], "tëxt", [], [{"role": "user", "content": "hi"}], [2**31 - 1]]
    params = [SamplingParams(n=2), SamplingParams(temperature=0.0)]
    batch, heads = Batch(), []
    for number, prompt in enumerate(prompts):
        kind, encoded = encode_prompt(prompt)
        index = batch.add(kind, encoded, encode_params(params[number % 2]))
        heads.append(wire.RequestHead(number, kind, prompt_length(kind, encoded), index, 0))
    tables, out = split(heads, batch.frames())
    out = list(out)
    assert [decode_params(one) for one in tables] == params
    assert decode_ids(out[0]) == [1, 2, 3] and out[1].decode() == "tëxt" and out[2] == b"" and decode_ids(out[4]) == [2**31 - 1]
    assert decode_chat(out[3]) == [Message("user", "hi")]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\x91\x80", b"\0" * 8],
        [b"\x91\x80", b"\0" * 7, b""],
        [b"\x91\x80", b"\0" * 12, b""],
        [b"\x91\x80", b"\0" * 8, b"x"],
        [b"\x90", b"\0" * 8, b""],
        [b"\x80", b"\0" * 8, b""],
        [b"garbage", b"\0" * 8, b""],
    ],
)
def test_frames_that_do_not_fit_their_heads_are_refused(frames):
    with pytest.raises(ProtocolError):
        split([wire.RequestHead(0, "ids", 2, 0, 0)], frames)


@pytest.mark.parametrize(
    "prompt", [[1.5], [[1]], ["a"], [1, "a"], [2**31], [-(2**31) - 1], [{"role": "user"}], [{"role": 1, "content": "x"}], None, 7]
)
def test_a_prompt_that_is_none_of_the_three_kinds_is_a_typed_error(prompt):
    with pytest.raises(ProtocolError) as caught:
        encode_prompt(prompt)
    assert caught.value.code == "invalid_prompt"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_and_template_kwargs_travel_with_the_sampling_params():
    params, kwargs = SamplingParams(n=2, stop=["x"]), {"enable_thinking": False}
    entry = encode_params(params, [TOOL], kwargs)
    assert decode_params(entry) == params
    assert decode_asked(entry) == Asked(params=params, tools=[TOOL], template_kwargs=kwargs)
    assert decode_asked(encode_params(params)) == Asked(params=params)
    assert encode_params(params) == encode_params(params, None, {}) == msgspec.msgpack.encode(params)


@pytest.mark.parametrize(
    ("chat", "code"),
    [
        ({"surprise": 1}, "invalid_params"),
        ([], "invalid_params"),
        ({"tools": [TOOL, TOOL]}, "invalid_tools"),
        ({"tools": {"a": 1}}, "invalid_tools"),
        ({"template_kwargs": {"messages": []}}, "invalid_template_kwargs"),
        ({"template_kwargs": [1]}, "invalid_template_kwargs"),
        ({"template_kwargs": {"a": msgspec.msgpack.Ext(1, b"")}}, "invalid_template_kwargs"),
        ({"template_kwargs": {"a": float("nan")}}, "invalid_template_kwargs"),
    ],
)
def test_tools_and_template_kwargs_of_the_wire_are_checked_like_those_of_python(chat, code):
    with pytest.raises(ProtocolError) as caught:
        decode_asked(msgspec.msgpack.encode({"chat": chat}))
    assert caught.value.code == code


def test_a_chat_travels_with_calls_results_and_reasoning_and_nothing_else():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "tool_call_id": "c"},
    ]
    calls = [ToolCall(FunctionCall("f", '{"a": 1}'), id="c")]
    expected = [
        Message("user", "hi", name="ann"),
        Message("assistant", "", reasoning_content="hm", tool_calls=calls),
        Message("tool", "ok", tool_call_id="c"),
    ]
    for prompt in (messages, ChatPrompt(messages=messages, tools=[TOOL]), expected):
        kind, encoded = encode_prompt(prompt)
        assert kind == "chat" and decode_chat(encoded) == expected
    for bad in (b'[{"role": "user", "content": "", "x": 1}]', b'[{"role": "user"}]', b'[{"role": "user", "content": null}]'):
        with pytest.raises(ProtocolError):
            decode_chat(bad)


def test_ids_from_numpy_are_taken_and_negative_ids_reach_the_engine_which_refuses_them():
    assert decode_ids(encode_ids(np.array([1, -1]))) == [1, -1]


@pytest.mark.parametrize("params", [{"n": 0}, {"temperature": -1.0}, {"surprise": 1}, {"n": "many"}, {"logit_bias": {1: 1e9}}, 7])
def test_sampling_params_of_the_wire_are_checked_like_those_of_python(params):
    with pytest.raises(ProtocolError) as caught:
        decode_params(msgspec.msgpack.encode(params))
    assert caught.value.code == "invalid_params"
