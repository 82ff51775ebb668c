"""Tokenizer files of Kimi's kind: the ids that the ranks say, every text back, user text never a structural token, broken files named."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import CORPUS
from tiktoken_samples import CODE, config, model_file, plain_ids, ranks, write_folder

from batchgen.errors import ModelError
from batchgen.text.stream import TextStream
from batchgen.text.tokenizer import Tokenizer

FIRST = len(ranks())
OPEN, SEP = FIRST + 3, FIRST + 4
HARD = [
    *CORPUS,
    CODE,
    "It's IT'S we'LL they'd O'Neil camelCase HTTPServer ǅungla naïve cafe\u0301",
    "汉字abc汉字 〇々ー 日本語のテキスト，テスト。𠀀",
    "12 123 1234 1234567 ٣٤٥٦ Ⅷ ²³ ½",
    "  leading,   runs   \t\t x\r\n\r\n\n  \n end  ",
    "👩‍🔬🇩🇪 ‱…—!?!?\n\n//\u00a0\u2028\x0b\x00",
]
assigned = st.characters(exclude_categories=["Cs", "Cn"])  # what a new character counts as depends on the library's edition of Unicode
texts = st.lists(st.one_of(st.sampled_from(HARD), st.text(assigned, max_size=8), st.sampled_from(["'s", "  ", "\r\n", "的", "123"])))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("kimi")))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", HARD)
def test_ids_are_those_of_a_plain_reading_of_the_ranks(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == plain_ids(text)
    assert tokenizer.decode(ids) == text


@given(parts=texts)
def test_any_text_has_the_plain_ids_and_comes_back(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.encode(text) == plain_ids(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(parts=texts, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_ids_in_any_portions_stream_the_same_text(tokenizer, parts, sizes):
    text = "".join(parts)
    ids, stream, at = tokenizer.encode(text), TextStream(tokenizer), 0
    while at < len(ids):
        size = sizes[at % len(sizes)]
        stream.push(ids[at : at + size])
        at += size
    stream.finish()
    assert stream.text == text


def test_words_are_cut_where_kimi_cuts_them(tokenizer):
    def pieces(text: str) -> list[str]:
        return [text[start:end] for _, (start, end) in tokenizer._parsing.pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("中文English混合") == ["中文", "English", "混合"]
    assert pieces("北京市 Pascal") == ["北京市", " Pascal"]
    assert pieces("HTTPServer's 1234567") == ["HTTPServer's", " ", "123", "456", "7"]
    assert pieces("camelCase a   b\n\n c") == ["camel", "Case", " a", "  ", " b", "\n\n", " c"]


def test_a_piece_that_is_a_token_is_that_token_however_it_would_merge(tmp_path):
    write_folder(tmp_path)
    whole = b"zqzq"  # no merge leads there
    (tmp_path / "tiktoken.model").write_text(model_file() + f"{base64.b64encode(whole).decode()} {FIRST}\n")
    shifted = {str(int(key) + 1): entry for key, entry in config()["added_tokens_decoder"].items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config() | {"added_tokens_decoder": shifted}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("zqzq") == [FIRST]
    assert FIRST not in tokenizer.encode("xzqzq") and tokenizer.decode(tokenizer.encode("xzqzq")) == "xzqzq"


def test_added_tokens_have_the_256_ids_behind_the_ranks(tokenizer):
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.eos_token_ids == [FIRST + 1]
    assert tokenizer.named_tokens == {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    text = f"[BOS]<|open|>hi<|sep|><|reserved_token_{FIRST + 9}|>[PAD]"
    assert tokenizer.encode(text, parse_special=True) == [FIRST, OPEN, *plain_ids("hi"), SEP, FIRST + 9, FIRST + 255]


def test_decode_shows_the_added_tokens_that_are_not_special(tokenizer):
    assert tokenizer.decode([FIRST, OPEN, *plain_ids("hi"), SEP, FIRST + 2]) == "<|open|>hi<|sep|>"


@given(parts=st.lists(st.one_of(st.sampled_from(["<|open|>", "<|sep|>", "[EOS]", "<|", "open|>", " "]), st.text(assigned, max_size=3))))
def test_a_users_text_never_becomes_an_added_token(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert max(ids, default=0) < FIRST
    assert tokenizer.decode(ids) == text


def test_a_message_never_becomes_an_added_token_and_the_template_does(tmp_path):
    template = "<|open|>{{ messages[0].content }}<|sep|>"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, chat_template=template))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<|open|><|sep|>[EOS]b"}])
    assert ids[0] == OPEN and ids[-1] == SEP and max(ids[1:-1]) < FIRST
    assert tokenizer.decode(ids) == "<|open|>a<|open|><|sep|>[EOS]b<|sep|>"


def test_a_tokenizer_json_beside_it_is_used_instead(tmp_path):
    from text_samples import byte_level

    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level()))
    assert Tokenizer.from_folder(tmp_path).vocab_size == 1 + max(entry["id"] for entry in byte_level()["added_tokens"])


LINES = model_file().splitlines()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES[:7], "YQ==", *LINES[8:]], "tiktoken.model, line 8: expected a token in base64 and its rank, got 'YQ=='"),
        ([*LINES[:7], "YQ== x", *LINES[8:]], "line 8: expected"),
        ([*LINES[:7], "Y!== 7", *LINES[8:]], "line 8: 'Y!==' is not base64"),
        ([*LINES, LINES[3]], f"line {FIRST + 1}: rank 3 is already that of line 4"),
        ([*LINES, f"{LINES[3].split()[0]} {FIRST}"], f"line {FIRST + 1}: the token .* is already on line 4"),
        ([*LINES[:300], *LINES[301:]], f"{FIRST - 1} tokens, but none has rank 300"),
        (LINES[:200], "no token for byte 0x"),
        ([], "no token for byte 0x00"),
    ],
)
def test_a_broken_rank_file_is_an_error_with_its_line(tmp_path, lines, message):
    write_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is 'QWenTokenizer'"),
        ({"added_tokens_decoder": {"5": {"content": "x"}}}, f"added token id '5' is not in {FIRST}..{FIRST + 255}"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "added token id 'x'"),
        ({"added_tokens_decoder": {str(FIRST): {"content": ""}}}, f"added token {FIRST} has no `content`"),
        ({"added_tokens_decoder": {str(FIRST + i): {"content": "x"} for i in (0, 1)}}, f"{FIRST} and {FIRST + 1} are both 'x'"),
    ],
)
def test_a_config_that_does_not_fit_the_ranks_is_an_error_with_its_entry(tmp_path, changes, message):
    write_folder(tmp_path, **changes)
    with pytest.raises(ModelError, match=f"tokenizer_config.json: .*{message}"):
        Tokenizer.from_folder(tmp_path)


def test_ranks_without_a_config_are_an_error(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: tokenizer_class is None"):
        Tokenizer.from_folder(tmp_path)
