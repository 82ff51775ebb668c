"""Incremental text equals whole text, however ids arrive, and stop strings are found where str.find finds them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import CORPUS, KINDS

from batchgen.text.stream import TextStream
from batchgen.text.tokenizer import Tokenizer

TOKENIZERS = {name: Tokenizer(KINDS[name]()) for name in ("byte_level", "byte_fallback")}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40),  # SentencePiece cannot tell ▁ from a space
    st.text(st.sampled_from("ab €😀世\n"), max_size=40),
    st.lists(st.sampled_from(CORPUS), max_size=2).map(" ".join),
)
stops = st.lists(st.text(st.sampled_from("ab €😀世"), min_size=1, max_size=4), min_size=1, max_size=4)
cuts = st.lists(st.integers(1, 7), min_size=1, max_size=8)


def pushes(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The ids cut into runs of the given sizes, repeated as needed."""
    runs, at, turn = [], 0, 0
    while at < len(ids):
        runs.append(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    return runs


def streamed(stream: TextStream, runs: list[list[int]]) -> tuple[list[str], str | None, int | None]:
    pieces, match, kept = [], None, None
    for run in runs:
        update = stream.push(run)
        pieces.append(update.text)
        match, kept = update.stop_match, update.num_tokens
        if match is not None:
            break
    return [*pieces, stream.finish()], match, kept


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that is complete first, the longest of those; by str.find alone."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    return (min(found)[0] + min(found)[1], min(found)[0]) if found else None


@each_tokenizer
@given(text=texts, sizes=cuts)
def test_streamed_pieces_concatenate_to_the_text_and_never_show_half_a_character(tokenizer, text, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer)
    pieces, match, _ = streamed(stream, pushes(ids, sizes))
    assert "".join(pieces) == text == tokenizer.decode(ids) == stream.text
    assert match is None
    assert all(piece.count("\ufffd") <= text.count("\ufffd") for piece in pieces)


@each_tokenizer
@given(data=st.data(), sizes=cuts)
def test_any_ids_stream_to_what_decode_says(tokenizer, data, sizes):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    pieces, _, _ = streamed(TextStream(tokenizer), pushes(ids, sizes))
    assert "".join(pieces) == tokenizer.decode(ids)


@each_tokenizer
@given(data=st.data(), stop=stops, include=st.booleans())
def test_the_result_does_not_depend_on_how_pushes_are_cut(tokenizer, data, stop, include):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    ids += tokenizer.encode(data.draw(texts), add_special_tokens=False)
    minimum = data.draw(st.integers(0, 20))
    results = []
    for sizes in ([1], [len(ids) or 1], data.draw(cuts)):
        stream = TextStream(tokenizer, stop, include_stop=include, min_tokens=minimum)
        pieces, match, kept = streamed(stream, pushes(ids, sizes))
        results.append(("".join(pieces), match, kept))
    assert results[0] == results[1] == results[2]


@each_tokenizer
@given(text=texts, stop=stops, sizes=cuts)
def test_stop_strings_are_found_exactly_where_find_finds_them(tokenizer, text, stop, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = first_match(text, stop)
    for include in (False, True):
        pieces, match, kept = streamed(TextStream(tokenizer, stop, include_stop=include), pushes(ids, sizes))
        if expected is None:
            assert (match, kept, "".join(pieces)) == (None, None, text)
            continue
        start, end = expected
        assert match == text[start:end]
        assert "".join(pieces) == text[: end if include else start]
        needed = next(n for n in range(1, len(ids) + 1) if stable_chars(tokenizer, ids[:n]) >= end)
        assert kept == needed


def stable_chars(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Characters that the ids spell in full."""
    raw = b"".join(tokenizer.pieces[i] for i in ids)
    text = raw.decode(errors="ignore")
    return len(text.removeprefix(" ") if tokenizer.drops_leading_space else text)


@each_tokenizer
@given(text=texts, stop=stops, sizes=cuts)
def test_text_that_could_begin_a_stop_string_is_held_back_and_nothing_else(tokenizer, text, stop, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream, seen = TextStream(tokenizer, stop), 0
    for run in pushes(ids, sizes):
        seen += len(run)
        if stream.push(run).stop_match is not None:
            return
        spelled = text[: stable_chars(tokenizer, ids[:seen])]
        held = max((n for s in stop for n in range(len(s)) if spelled.endswith(s[:n])), default=0)
        assert stream.text == spelled[: len(spelled) - held]


@each_tokenizer
def test_a_stop_string_across_tokens_cuts_at_the_character_and_keeps_the_completing_token(tokenizer):
    text = "the lazy dog, then stops. STOP! End of the story"
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, ["y dog, t"])
    update = stream.push(ids)
    assert stream.text == update.text == "the laz"
    assert update.stop_match == "y dog, t"
    kept = tokenizer.decode(ids[: update.num_tokens])
    assert "y dog, t" in kept and "y dog, t" not in tokenizer.decode(ids[: update.num_tokens - 1])


@each_tokenizer
def test_the_stop_string_complete_first_wins_and_of_equals_the_longest(tokenizer):
    ids = tokenizer.encode("xabcdefg", add_special_tokens=False)
    for stop, text, match in (
        (["abcdef", "cd"], "xab", "cd"),
        (["c", "abc", "bc"], "x", "abc"),
        (["g", "f"], "xabcde", "f"),
    ):
        stream = TextStream(tokenizer, stop)
        assert stream.push(ids).stop_match == match
        assert stream.text == text


@each_tokenizer
def test_a_stop_string_complete_before_min_tokens_is_ordinary_text(tokenizer):
    ids = [tokenizer.pieces.index(b"!")] * 6
    for minimum in range(7):
        stream = TextStream(tokenizer, ["!"], min_tokens=minimum)
        update = stream.push(ids)
        assert update.num_tokens == max(minimum, 1)
        assert stream.text == "!" * (max(minimum, 1) - 1)
    assert TextStream(tokenizer, ["!"], min_tokens=7).push(ids).stop_match is None


@each_tokenizer
def test_pushes_after_a_match_change_nothing(tokenizer):
    ids = tokenizer.encode("over the lazy dog", add_special_tokens=False)
    stream = TextStream(tokenizer, ["the"])
    first = stream.push(ids)
    again = stream.push(ids)
    assert (again.text, again.stop_match, again.num_tokens) == ("", first.stop_match, first.num_tokens)
    assert stream.finish() == "" and stream.text == "over "


@each_tokenizer
def test_finish_gives_out_held_text_and_marks_an_unfinished_character(tokenizer):
    ids = tokenizer.encode("ab🦀", add_special_tokens=False)
    stream = TextStream(tokenizer, ["bc", "b🦀x"])
    assert stream.push(ids[:-1]).text == "a"
    assert stream.finish() == "b\ufffd"
    assert stream.text == "ab\ufffd" == tokenizer.decode(ids[:-1])


@each_tokenizer
def test_control_tokens_add_no_text_but_count_as_tokens(tokenizer):
    ids = tokenizer.encode("ab", add_special_tokens=False)
    stream = TextStream(tokenizer, ["ab"])
    control = sorted(tokenizer.special_ids)
    update = stream.push([*control, *ids[:-1], *control, ids[-1], *control])
    assert update.num_tokens == len(ids) + 2 * len(control)
    assert stream.text == ""
