"""Every limit of the wire, at the limit and one above."""

import tracemalloc

import msgspec
import pytest

from batchgen.errors import ErrorInfo
from batchgen.sampling_params import SamplingParams
from rollout import limits, wire
from rollout.batches import Batch, decode_chat, encode_params, split
from rollout.calls import encode_prompt
from rollout.errors import ProtocolError
from rollout.limits import ServiceLimits
from rollout.results import check_body

DECODER = wire.HeaderDecoder(wire.ToService | wire.ToClient | wire.ToNode)
SESSION = "0" * 32


def head(number: int = 0, kind: str = "ids", length: int = 0, params: int = 0) -> wire.RequestHead:
    return wire.RequestHead(number, kind, length, params, 0)


def at_and_above(make, limit: int) -> None:
    """make(limit) passes, make(limit + 1) is a ProtocolError."""
    make(limit)
    with pytest.raises(ProtocolError):
        make(limit + 1)


def decode(message: msgspec.Struct) -> None:
    DECODER.decode(msgspec.msgpack.encode(message))


def test_header_bytes():
    empty = len(msgspec.msgpack.encode({"type": "bye", "x": "y" * 0x1000}))

    def make(size: int) -> None:
        frame = msgspec.msgpack.encode({"type": "drain"})
        # a fixed-size message cannot fill a header: check the size test alone, on bytes that are not a message
        try:
            DECODER.decode(frame + b"\0" * (size - len(frame)))
        except ProtocolError as error:
            if "the limit is" in str(error):
                raise

    assert empty < limits.MAX_HEADER_BYTES
    at_and_above(make, limits.MAX_HEADER_BYTES)


def test_the_sender_checks_its_headers_too():
    with pytest.raises(ProtocolError):
        wire.encode(wire.Reject(requests=[], error=ErrorInfo(code="x", message="y" * limits.MAX_HEADER_BYTES)))


def test_requests_per_submit():
    at_and_above(lambda count: decode(wire.Submit(requests=[head(k) for k in range(count)])), limits.MAX_REQUESTS_PER_SUBMIT)


def test_parts_per_assign():
    part = wire.AssignHead(0, "ids", 0, 0, 0, [(0, 1)])
    at_and_above(lambda count: decode(wire.Assign(parts=[part] * count)), limits.MAX_REQUESTS_PER_SUBMIT)


def test_items_per_results():
    def make(count: int) -> None:
        items = [{"item": "prompt", "request": 0, "num_tokens": 0}] * count
        DECODER.decode(msgspec.msgpack.encode({"type": "results", "seq": 0, "items": items}))

    at_and_above(make, limits.MAX_ITEMS_PER_RESULTS)


def test_ids_per_message():
    for kind in (wire.Cancel, wire.Accept):
        at_and_above(lambda count, kind=kind: decode(kind(requests=[0] * count)), limits.MAX_IDS_PER_MESSAGE)
    at_and_above(lambda count: decode(wire.Abort(parts=[0] * count)), limits.MAX_IDS_PER_MESSAGE)


def test_request_ids():
    def make(number: int) -> None:
        DECODER.decode(msgspec.msgpack.encode({"type": "cancel", "requests": [number]}))

    at_and_above(make, limits.MAX_REQUEST_ID)


def test_samples_per_request():
    at_and_above(lambda last: decode(wire.Assign(parts=[wire.AssignHead(0, "ids", 0, 0, 0, [(0, last)])])), 1024)
    at_and_above(lambda count: decode(wire.Assign(parts=[wire.AssignHead(0, "ids", 0, 0, 0, [(0, 1)] * count)])), 512)


def sample_item(**fields):
    values = {
        "request": 0,
        "index": 0,
        "finish_reason": "stop",
        "num_tokens": 0,
        "text_bytes": 0,
        "seed": 0,
        "logprobs_mode": "raw",
        "spans": [],
    }
    return wire.Results(seq=0, items=[wire.SampleItem(**(values | fields))])


def test_output_tokens_spans_and_top_logprobs_of_a_sample():
    at_and_above(lambda count: decode(sample_item(num_tokens=count)), limits.MAX_OUTPUT_TOKENS)
    at_and_above(lambda count: decode(sample_item(spans=[(0, 0, 0)] * count)), limits.MAX_SPANS)
    at_and_above(lambda count: decode(sample_item(top_k=count)), 64)
    at_and_above(lambda count: decode(sample_item(index=count)), 1023)


def test_item_bytes():
    at_and_above(lambda count: decode(sample_item(text_bytes=count)), limits.MAX_ITEM_BYTES)

    class Sized:
        """Bytes without the memory."""

        def __init__(self, size: int):
            self.size = size

        def __len__(self) -> int:
            return self.size

    def make(size: int) -> None:
        (item,) = sample_item(text_bytes=limits.MAX_ITEM_BYTES, top_k=0, num_tokens=0).items
        item.text_bytes = size
        check_body(item, Sized(size))

    at_and_above(make, limits.MAX_ITEM_BYTES)


def test_error_texts_and_names():
    at_and_above(lambda size: decode(wire.Hello(version=1, session=SESSION, name="x" * size)), limits.MAX_NAME_CHARS)
    assert len(wire.cut("x" * (limits.MAX_ERROR_CHARS + 1))) == limits.MAX_ERROR_CHARS == len(wire.cut("x" * limits.MAX_ERROR_CHARS))
    at_and_above(lambda size: decode(sample_item(detail="x" * size)), limits.MAX_ERROR_CHARS)


def test_timeouts():
    def make(seconds: float) -> None:
        decode(wire.Submit(requests=[wire.RequestHead(0, "ids", 0, 0, 0, seconds)]))

    at_and_above(make, int(limits.MAX_TIMEOUT_S))


def test_prompt_tokens():
    def make(count: int) -> None:
        split([head(length=count)], [b"\x91\x80", b"\0" * (4 * count), b""])

    at_and_above(make, limits.MAX_PROMPT_TOKENS)
    with pytest.raises(ProtocolError, match="tokens"):
        encode_prompt([0] * (limits.MAX_PROMPT_TOKENS + 1))


def test_text_bytes():
    at_and_above(lambda size: decode(wire.Submit(requests=[head(kind="text", length=size)])), limits.MAX_TEXT_BYTES)
    at_and_above(lambda size: encode_prompt("x" * size), limits.MAX_TEXT_BYTES)


def test_prompt_bytes_of_a_message():
    quarter = limits.MAX_SUBMIT_BYTES // 4

    def make(total: int) -> None:
        sizes = [quarter] * 4 + [total - 4 * quarter]
        split([head(kind="text", length=size) for size in sizes], [b"\x91\x80", b"", b"\0" * total])

    at_and_above(make, limits.MAX_SUBMIT_BYTES)


def test_params_per_message():
    def make(count: int) -> None:
        split([head()], [msgspec.msgpack.encode([{}] * count), b"", b""])

    at_and_above(make, limits.MAX_PARAMS_PER_SUBMIT)


def test_a_params_frame_with_too_many_entries_is_refused_before_they_are_made():
    bomb = msgspec.msgpack.encode([{}] * (limits.MAX_PARAMS_BYTES - 5))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="at most 64"):
        split([head()], [bomb, b"", b""])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_params_bytes():
    def make(size: int) -> None:
        split([head()], [msgspec.msgpack.encode([b"x" * (size - 6)]), b"", b""])

    at_and_above(make, limits.MAX_PARAMS_BYTES)


def test_params_that_python_accepts_always_fit_the_wire():
    long = ["x" * 512] * 64
    params = SamplingParams(
        stop=long, bad_words=long, logit_bias=dict.fromkeys(range(1 << 30, (1 << 30) + 8192), 1.5),
        allowed_token_ids=[1 << 30] * 8192, stop_token_ids=[1 << 30] * 8192,
    )  # fmt: skip
    batch = Batch()
    assert batch.add("ids", b"", encode_params(params)) == 0
    split([head()], batch.frames())


def test_a_full_batch_never_exceeds_the_message_limits():
    batch, heads = Batch(), []
    while (index := batch.add("ids", b"\0" * 400, b"\x81\xa1n" + bytes([len(heads) % 100]))) is not None:
        heads.append(head(len(heads), length=100, params=index))
    wire.encode(wire.Submit(requests=heads))
    split(heads, batch.frames())


def test_chat_messages():
    def make(count: int) -> None:
        decode_chat(msgspec.json.encode([{"role": "u", "content": ""}] * count))

    at_and_above(make, limits.MAX_CHAT_MESSAGES)
    with pytest.raises(ProtocolError):
        decode_chat(b"[]")


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_service_limits_must_be_positive(value):
    with pytest.raises(ValueError, match="credits"):
        ServiceLimits(credits=value)
