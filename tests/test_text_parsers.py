"""Any text is one message, however it is cut; nothing is lost, nothing raises, and only what could become a marker waits."""

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_samples import SAMPLES, TOOLS, Sample, parts, read

from batchgen.text.message import Message, MessageDelta, MessageParser
from batchgen.text.parsers.formats import FORMATS, HARMONY, TAG_FORMATS, tokens_of
from batchgen.text.parsers.harmony import MAX_HEADER_CHARS

each_format = pytest.mark.parametrize("fmt", FORMATS)
each_sample = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())


def summed(deltas: list[MessageDelta]) -> tuple[str, str, list]:
    return (
        "".join(delta.content or "" for delta in deltas),
        "".join(delta.reasoning_content or "" for delta in deltas),
        [delta.tool_call for delta in deltas if delta.tool_call is not None],
    )


def same(deltas: list[MessageDelta], message: Message) -> bool:
    return summed(deltas) == (message.content or "", message.reasoning_content or "", message.tool_calls)


def fragments(fmt: str) -> list[str]:
    """Pieces of the format's own samples, its markers whole and broken, and what else could confuse a parser."""
    found = {
        "a",
        " ",
        "\n",
        "x\n\n",
        '"',
        "\\",
        "{",
        "}",
        "<",
        "```",
        "</think>",
        "<think>",
        '{"name": "f", "arguments": {}}',
        *tokens_of(fmt),
    }
    form = TAG_FORMATS.get(fmt)
    if form is not None:
        found |= {*form.think, *itertools.chain(*form.sections), *(form.call or ()), form.guard.open, form.guard.close, *form.dropped}
    else:
        found |= {"analysis", "final", "commentary", " to=functions.f", " to=", "assistant", "json", "h" * MAX_HEADER_CHARS}
    for sample in SAMPLES.values():
        if sample.fmt == fmt:
            found |= {sample.text, sample.text[: len(sample.text) // 2], sample.text[len(sample.text) // 2 :]}
    return sorted(found)


FRAGMENTS = {fmt: fragments(fmt) for fmt in FORMATS}


@each_sample
def test_a_message_is_the_same_at_any_cut_of_its_text(sample: Sample):
    whole = read(sample)
    for cut in range(len(sample.text) + 1):
        parser = MessageParser(sample.fmt, sample.tools, sample.open)
        deltas = parts(parser, [sample.text[:cut], sample.text[cut:]])
        assert parser.message == whole, cut
        assert same(deltas, whole), cut
    assert read(sample, list(sample.text)) == whole


@each_sample
def test_a_message_that_breaks_off_anywhere_neither_raises_nor_depends_on_its_pieces(sample: Sample):
    for end in range(len(sample.text)):
        text = sample.text[:end]
        parser = MessageParser(sample.fmt, sample.tools, sample.open)
        assert same(parts(parser, list(text)), parser.message)
        assert parser.message == read(sample, [text])
        assert [(call.function.name, call.function.arguments) for call in parser.message.tool_calls] == list(
            sample.calls[: len(parser.message.tool_calls)]
        )


@each_format
@settings(max_examples=250)
@given(data=st.data())
def test_any_mixture_of_markers_is_the_same_message_at_any_cut(fmt, data):
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS[fmt]), st.text(max_size=3)), max_size=12)))
    thinking_open = data.draw(st.booleans())
    whole = MessageParser(fmt, TOOLS, thinking_open)
    assert same(parts(whole, [text]), whole.message)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for pieces in (list(text), [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]):
        parser = MessageParser(fmt, TOOLS, thinking_open)
        assert same(parts(parser, pieces), whole.message)
        assert parser.message == whole.message


@each_format
@given(text=st.text(max_size=60))
def test_text_without_markers_is_content_to_the_character(fmt, text):
    text = text.replace("<", "(")
    if fmt == HARMONY and not text.strip():
        text = "x" + text
    parser = MessageParser(fmt)
    parts(parser, list(text))
    assert parser.message == Message(content=text)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != HARMONY])
def test_text_is_given_out_at_once_and_only_a_possible_marker_waits(fmt):
    parser = MessageParser(fmt)
    marker = TAG_FORMATS[fmt].think[0]
    (delta,) = parser.feed("Hello" + marker[:-1])
    assert delta.content == "Hello"
    (delta,) = parser.feed("?")
    assert delta.content == marker[:-1] + "?"


@each_format
def test_reasoning_is_given_out_as_it_comes(fmt):
    parser = MessageParser(fmt, thinking_open=True)
    assert [delta.as_openai() for delta in parser.feed("One two")] == [{"reasoning_content": "One two"}]
    assert parser.finish() == []
    assert parser.message.as_openai() == {"role": "assistant", "content": "", "reasoning_content": "One two"}


def test_white_space_between_a_call_and_other_text_in_a_section_is_kept_at_any_cut():
    section = "<tool_call>\n<function=run>\n</function>\nso\n\n<tool_call>\n<function=run>\n</function>\n</tool_call>"
    for pieces in ([section], list(section)):
        message = read(Sample(fmt="qwen3_coder", text=section), pieces)
        assert (message.content, len(message.tool_calls)) == ("so", 2)
    broken = "<tool_call>\n<function=run>\n</function>\n<\n\n<tool_call>"
    for pieces in ([broken], list(broken)):
        assert read(Sample(fmt="qwen3_coder", text=broken), pieces).content == "<\n\n<tool_call>"


def test_think_tags_inside_an_answer_are_text():
    text = "Models write <think>…</think> around it."
    assert read(Sample(fmt="hermes", text=text)) == Message(content=text)


def test_an_empty_block_of_reasoning_is_no_reasoning():
    assert read(Sample(fmt="hermes", text="<think>\n\n</think>\n\nHi")) == Message(content="Hi")


def test_reasoning_that_speaks_of_a_call_and_closes_stays_reasoning():
    talk = 'I could write <tool_call>\n{"name": "run", "arguments": {}}\n</tool_call> but why?'
    message = read(Sample(fmt="hermes", text=talk + "\n</think>\n\nNo.", open=True))
    assert message == Message(content="No.", reasoning_content=talk)
    assert read(Sample(fmt="hermes", text="I could write <tool_call> and", open=True)).reasoning_content == "I could write <tool_call> and"


@pytest.mark.parametrize("fmt", ["hermes", "qwen3_coder", "glm", "minimax_m2", "deepseek_v31", "deepseek_v32"])
def test_a_call_ends_reasoning_that_never_closed(fmt):
    sample = next(sample for sample in SAMPLES.values() if sample.fmt == fmt)
    form = TAG_FORMATS[fmt]
    start = min(at for opening in form.openings if (at := sample.text.find(opening)) >= 0)
    message = read(Sample(fmt=fmt, text="Hm. " + sample.text[start:], open=True))
    assert message.reasoning_content == "Hm."
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == list(sample.calls)


@pytest.mark.parametrize("fmt", FORMATS)
def test_time_is_linear_in_the_text_whatever_it_repeats(fmt):
    form, rng = TAG_FORMATS.get(fmt), random.Random(0)
    units = ["\n", " ", '"', "\\", "<", "{", "[", *tokens_of(fmt), "".join(rng.choices(FRAGMENTS[fmt], k=12))[:200]]
    units += [*(form.call or ()), form.guard.open, (form.call or ("",))[0] + form.guard.open] if form is not None else []
    for unit in units:
        text = unit * (60_000 // len(unit))
        start = time.perf_counter()
        parser = MessageParser(fmt, TOOLS)
        parts(parser, [text[at : at + 16] for at in range(0, len(text), 16)])
        assert time.perf_counter() - start < 5, unit


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match="'qwen99' is not known; formats: plain, hermes"):
        MessageParser("qwen99")
