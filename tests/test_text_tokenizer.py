"""Ids and text: the same as transformers and tokenizers, except that text never becomes a control token."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import CORPUS, KINDS, SPECIAL, byte_level, metaspace
from tiny_models import save_byte_tokenizer
from tokenizers import Tokenizer as Library

from batchgen import LLM
from batchgen.errors import ModelError, RequestError
from batchgen.text.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
each_kind = pytest.mark.parametrize("kind", KINDS)
hostile_texts = st.lists(st.one_of(st.sampled_from([*SPECIAL, "<mask>", " ", "<", "</s", "<think>"]), st.text(max_size=5))).map("".join)


def make(kind: str, **options) -> tuple[Tokenizer, Library]:
    spec = KINDS[kind]()
    return Tokenizer(spec, CONFIG, **options), Library.from_str(json.dumps(spec))


@each_kind
@pytest.mark.parametrize("text", [*CORPUS, "", " two  spaces ", "\n"])
def test_ordinary_text_has_the_ids_and_the_text_of_the_library(kind, text):
    ours, library = make(kind)
    ids = library.encode(text).ids
    assert ours.encode(text) == ours.encode(text, parse_special=True) == ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=True)


@each_kind
def test_a_text_that_looks_rendered_is_told_of_once(kind, caplog):
    ours, _ = make(kind)
    ours.encode("Hello </s>")
    ours.encode("</s>Hello", parse_special=True)
    assert not caplog.records
    for _ in range(2):
        ours.encode("</s>Hello")
    assert [record.message.startswith("a text begins with the name of a control token") for record in caplog.records] == [True]


@each_kind
@given(text=hostile_texts)
def test_text_never_becomes_a_control_token(kind, text):
    ours, _ = make(kind)
    ids = ours.encode(text, add_special_tokens=False)
    unknown = {0} if kind == "metaspace" else set()
    assert not (ours.special_ids - unknown).intersection(ids)
    if kind != "metaspace":  # its vocabulary cannot spell everything
        assert ours.decode(ids) == (text.replace("▁", " ") if kind == "byte_fallback" else text)


@each_kind
@given(text=hostile_texts)
def test_a_message_never_becomes_a_control_token(kind, text):
    ours, library = make(kind, chat_templates={"default": TEMPLATE})
    count = {name: library.token_to_id(name) for name in SPECIAL[1:] if library.token_to_id(name) is not None}
    ids = ours.apply_chat_template([{"role": "user", "content": text}])
    reference = ours.apply_chat_template([{"role": "user", "content": "x"}])
    for token_id in count.values():
        assert ids.count(token_id) == reference.count(token_id)


@each_kind
def test_control_tokens_are_parsed_for_callers_who_ask(kind):
    ours, library = make(kind)
    assert library.token_to_id("</s>") in ours.encode("a</s>b", parse_special=True)


@each_kind
def test_a_prompt_of_llm_is_text_and_the_tokenizer_is_there_for_callers_who_render_their_own(kind):
    ours, library = make(kind)
    llm = LLM.__new__(LLM)
    llm.engine = SimpleNamespace(tokenizer=ours)
    end = library.token_to_id("</s>")
    assert end not in llm.encode("a</s>b") and end in llm.encode(llm.engine.tokenizer.encode("a</s>b", parse_special=True))


def test_special_is_also_what_the_config_calls_special_or_ends_generation():
    spec = byte_level()
    spec = spec | {"added_tokens": [entry | {"special": False} for entry in spec["added_tokens"]]}
    ids = {entry["content"]: entry["id"] for entry in spec["added_tokens"]}
    config = {"bos_token": "<s>", "added_tokens_decoder": {str(ids["<|im_start|>"]): {"content": "<|im_start|>", "special": True}}}
    tokenizer = Tokenizer(spec, config, [ids["<|im_end|>"]])
    assert tokenizer.special_ids == {ids["<s>"], ids["<|im_start|>"], ids["<|im_end|>"]}
    assert tokenizer.decode([ids["<s>"], ids["<think>"], ids["<|im_end|>"]]) == "<think>"
    assert not tokenizer.special_ids.intersection(tokenizer.encode("<s><|im_start|><|im_end|>"))


def test_chat_ids_equal_transformers_when_messages_hold_no_control_token(tmp_path):
    from transformers import PreTrainedTokenizerFast

    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": CORPUS[1]},
        {"role": "tool", "content": "<think>"},
    ]
    for kind in KINDS:
        ours, library = make(kind, chat_templates={"default": TEMPLATE})
        theirs = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.apply_chat_template(messages) == expected


def test_a_message_with_a_control_token_changes_only_its_own_stretch_of_ids():
    ours, library = make("byte_level", chat_templates={"default": TEMPLATE})
    plain = [{"role": "user", "content": "the quick"}, {"role": "user", "content": "the dog"}]
    hostile = [plain[0], {"role": "user", "content": "the<|im_end|> dog"}]
    start = ours.apply_chat_template(plain[:1], add_generation_prompt=False)
    ids = ours.apply_chat_template(hostile)
    assert ids[: len(start)] == start
    rendered = library.decode(ids, skip_special_tokens=False)
    assert rendered.endswith("<|im_start|>user\nthe<|im_end|> dog<|im_end|>\n<|im_start|>assistant\n")


def test_control_tokens_in_names_tools_and_variables_stay_text():
    source = "{{ messages[0].name }}{{ tools | tojson(ensure_ascii=True) }}{{ mode }}<|im_end|>"
    tokenizer = Tokenizer(byte_level(), CONFIG, chat_templates={"default": source})
    end = "<|im_end|>"
    ids = tokenizer.apply_chat_template([{"role": "user", "name": end}], tools=[{end: [end]}], mode=end)
    assert len(tokenizer.special_ids.intersection(ids)) == 1 and ids.count(ids[-1]) == 1
    assert tokenizer.decode(ids) == f'{end}[{{"{end}": ["{end}"]}}]{end}'


def test_bad_words_are_spelled_with_and_without_a_leading_space():
    for kind in KINDS:
        ours, library = make(kind)
        found = ours.bad_word_ids(["quick", " the"])
        assert len(found) == 3
        spelled = ["".join(ours.pieces[i].decode() for i in ids) for ids in found]
        assert spelled == ["quick", " quick", " the"]
        text = library.encode("lazy quick the", add_special_tokens=False).ids
        assert any(text[i : i + len(found[1])] == found[1] for i in range(len(text)))


def test_a_control_token_named_as_a_bad_word_is_its_spelling():
    ours, _ = make("byte_level")
    assert not any(ours.special_ids.intersection(ids) for ids in ours.bad_word_ids(["</s>"]))


@pytest.mark.parametrize("text", ["\ud800", b"bytes", None, 7])
def test_what_is_not_text_is_refused(text):
    ours, _ = make("byte_level")
    with pytest.raises(RequestError) as caught:
        ours.encode(text)
    assert caught.value.code == "invalid_text"


def write_folder(path, **files) -> None:
    for name, value in files.items():
        name = name.replace("__", ".")
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_folder_gives_tokens_template_and_every_eos_id(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    write_folder(tmp_path, tokenizer__json=byte_level(), tokenizer_config__json=CONFIG | {"chat_template": "from config"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.vocab_size == 1 + max(entry["id"] for entry in byte_level()["added_tokens"])
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}])) == "from config"
    write_folder(tmp_path, config__json={"eos_token_id": 4}, chat_template__jinja="from file")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == [4, 2]
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}])) == "from file"
    write_folder(tmp_path, generation_config__json={"eos_token_id": [3, 2]})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == [3, 2]


def test_a_named_template_is_used_for_tools(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_folder(tmp_path, tokenizer__json=byte_level(), tokenizer_config__json={"chat_template": templates})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}])) == "plain"
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}], tools=[{}])) == "tools"


def test_a_tokenizer_json_that_truncates_or_pads_does_neither_here():
    limits = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    spec = byte_level() | {"truncation": limits}
    assert Tokenizer(spec).encode(CORPUS[0]) == Tokenizer(byte_level()).encode(CORPUS[0])


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": "{"},
        {"tokenizer__json": "[]"},
        {"tokenizer__json": {"model": {"type": "nonsense"}}},
        {"tokenizer__json": byte_level(), "generation_config__json": {"eos_token_id": "2"}},
    ],
)
def test_a_broken_folder_is_a_model_error(tmp_path, files):
    write_folder(tmp_path, **files)
    with pytest.raises(ModelError):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_does_not_work_token_by_token_is_a_model_error(decoder):
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(metaspace() | {"decoder": decoder}).decode([5])


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("tokenizer.json", b'{"added_tokens": [{"id": "x"}]}', r"tokenizer.json: .*added_tokens"),
        ("tokenizer.json", b'{"added_tokens": null}', r"tokenizer.json: .*added_tokens"),
        ("tokenizer.json", b'{"decoder": ["x"]}', r"tokenizer.json: .*decoder"),
        ("tokenizer.json", b'{"a":' * 30000, r"tokenizer.json is not JSON"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"1": "x"}}', r"tokenizer_config.json: .*added_tokens_decoder"),
        ("tokenizer_config.json", b'{"eos_token": ["x"]}', r"tokenizer_config.json: .*eos_token"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}]}', r"tokenizer_config.json: .*chat_template"),
        ("special_tokens_map.json", b'{"pad_token": [1]}', r"special_tokens_map.json: .*pad_token"),
        ("chat_template.jinja", b"\xff", r"chat_template.jinja is not text"),
    ],
)
def test_a_file_with_fields_of_another_type_is_refused_and_named(tmp_path, file, content, match):
    save_byte_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=match):
        Tokenizer.from_folder(tmp_path)
