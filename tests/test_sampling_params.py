"""Sampling parameters: every wrong value is refused with its name, every right one survives the wire."""

import math

import msgspec
import pytest

from batchgen.errors import RequestError
from batchgen.sampler import check_params
from batchgen.sampling_params import (
    MAX_N,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)

AT_LIMIT = [
    ("n", 1, MAX_N),
    ("max_tokens", 1, MAX_TOKENS),
    ("temperature", 0.0, 1e6),
    ("top_p", 0.0, 1.0),
    ("top_k", 0, 1 << 31),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 1e6),
    ("seed", 0, MAX_SEED),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
]
WRONG = [
    ("n", 1.0),
    ("n", True),
    ("n", "1"),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", None),
    ("repetition_penalty", 0.0),
    ("logprobs_mode", "cooked"),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x" * (MAX_STOP_CHARS + 1)]),
    ("stop", ["x"] * (MAX_STOP_STRINGS + 1)),
    ("bad_words", [""]),
    ("bad_words", ["x"] * (MAX_STOP_STRINGS + 1)),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 31]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", [0] * (MAX_TOKEN_LIST + 1)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [True]),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", dict.fromkeys(range(MAX_TOKEN_LIST + 1), 1.0)),
]
FULL = SamplingParams(
    n=3,
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=-0.1,
    repetition_penalty=1.1,
    logit_bias={5: -2.5, 7: 3.0},
    allowed_token_ids=[5, 7, 9],
    bad_words=["bad word"],
    stop=["\n\n"],
    stop_token_ids=[9],
    include_stop=True,
    ignore_eos=True,
    seed=MAX_SEED,
    logprobs=4,
    prompt_logprobs=0,
    logprobs_mode="raw",
    return_routed_experts=True,
)


@pytest.mark.parametrize(("name", "low", "high"), AT_LIMIT)
def test_each_number_is_taken_at_its_limits_and_refused_beyond(name: str, low: float, high: float):
    assert getattr(SamplingParams(**{name: low}), name) == low
    assert getattr(SamplingParams(**{name: high}), name) == high
    step = 1 if type(low) is int else 1e-7
    for value in (low - step, high + step * max(1.0, high)):
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: int(value) if type(low) is int else value})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_each_wrong_value_is_refused_by_name(name: str, value: object):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_lists_and_strings_are_taken_at_their_limits():
    SamplingParams(stop=["x" * MAX_STOP_CHARS] * MAX_STOP_STRINGS, bad_words=["x"] * MAX_STOP_STRINGS)
    SamplingParams(allowed_token_ids=list(range(MAX_TOKEN_LIST)), logit_bias=dict.fromkeys(range(MAX_TOKEN_LIST), 100.0))
    SamplingParams(stop_token_ids=[(1 << 31) - 1] * MAX_TOKEN_LIST)


def test_min_tokens_over_max_tokens_is_refused():
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(max_tokens=5, min_tokens=6)


def test_unknown_fields_are_refused_in_python_and_on_the_wire():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
    for encoded in (msgspec.msgpack.encode({"beam_width": 4}), msgspec.json.encode({"beam_width": 4})):
        decode = msgspec.json.decode if encoded[:1] == b"{" else msgspec.msgpack.decode
        with pytest.raises(msgspec.ValidationError, match="beam_width"):
            decode(encoded, type=SamplingParams)


@pytest.mark.parametrize("wrong", [{"n": 0}, {"temperature": -0.1}, {"top_p": 1.5}, {"logit_bias": {3: 101.0}}, {"n": "3"}, {"stop": [""]}])
def test_wrong_values_are_refused_on_the_wire(wrong: dict[str, object]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wrong), type=SamplingParams)


@pytest.mark.parametrize("params", [SamplingParams(), FULL])
def test_the_wire_keeps_every_field(params: SamplingParams):
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(params), type=SamplingParams) == params


def test_full_params_set_every_field():
    for field in msgspec.structs.fields(SamplingParams):
        assert getattr(FULL, field.name) != field.default


def test_defaults_cost_nothing_on_the_wire():
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


def test_a_bare_string_is_a_list_of_one():
    assert SamplingParams(stop="END", bad_words="no") == SamplingParams(stop=["END"], bad_words=["no"])


def test_params_cannot_be_changed():
    with pytest.raises(AttributeError):
        FULL.n = 4


@pytest.mark.parametrize(
    ("params", "code"),
    [
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias_out_of_range"),
        (SamplingParams(allowed_token_ids=[1, 100]), "token_id_out_of_range"),
        (SamplingParams(stop_token_ids=[100]), "token_id_out_of_range"),
    ],
)
def test_tokens_outside_the_vocabulary_are_a_typed_error_of_that_request(params: SamplingParams, code: str):
    with pytest.raises(RequestError, match="100") as caught:
        check_params(params, vocab_size=100)
    assert caught.value.code == code and not caught.value.retryable
    check_params(params, vocab_size=101)
