"""A model folder's tokenizer. In: text or chat messages, and ids. Out: ids, and text. Never lets text become a control token unasked.

Hugging Face parses control tokens (`<|im_end|>`, `</s>`) wherever they appear, so a user's text can close its own turn and open
another. Here only a chat template, or a caller who passes `parse_special=True`, writes control tokens: in prompts and in messages
their names are ordinary text. Control tokens are those marked special in tokenizer.json or tokenizer_config.json, named as bos, eos,
pad, ... there, or that end generation: what `decode` leaves out. Other added tokens (`<think>`) are text both ways; in folders with
tiktoken.model, whose formats are built of them, `decode` shows them but no text of a user's becomes one.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from batchgen.errors import ModelError, RequestError
from batchgen.text import deepseek_v32, kimi_k3
from batchgen.text.chat_template import ChatTemplate, check_messages, map_strings, with_arguments
from batchgen.text.parsers.formats import format_for
from batchgen.text.pieces import token_pieces
from batchgen.text.tiktoken_files import tiktoken_spec

log = logging.getLogger(__name__)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text in, ids out, and back. `spec` is a parsed tokenizer.json, `config` a parsed tokenizer_config.json."""

    def __init__(
        self,
        spec: dict[str, Any],
        config: dict[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: dict[str, str] | None = None,
        num_ids: int = 0,
        guard_added: bool = False,
        model_type: str = "",
    ):
        """`guard_added`: no added token is made from a user's text, also those that decode shows.

        `model_type`: config.json's. It tells the format of messages where the chat template does not, and that a folder without a
        template is Kimi-K3's or DeepSeek-V3.2's.
        """
        config = config or {}
        self._num_ids = num_ids
        self.named_tokens = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name)))}
        """`bos_token`, `eos_token`, ... as the chat template sees them."""
        special = {entry["content"] for entry in config.get("added_tokens_decoder", {}).values() if entry.get("special")}
        special |= set(self.named_tokens.values())
        added = [
            entry | {"special": entry["special"] or entry["content"] in special or entry["id"] in eos_token_ids}
            for entry in spec.get("added_tokens", [])
        ]
        guarded = [entry | {"special": entry["special"] or guard_added} for entry in added]
        self._spec = spec | {"added_tokens": guarded, "truncation": None, "padding": None}
        self._parsing = _build(self._spec)
        self._vocab = self._parsing.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        """Ids are 0..vocab_size-1; the model's table may be padded beyond it."""
        self.special_ids = frozenset(entry["id"] for entry in added if entry["special"])
        """Control tokens: never made from a user's text, never shown by decode."""
        self._control_ids = frozenset(entry["id"] for entry in guarded if entry["special"]) - (
            {_unknown_id(spec["model"], self._vocab)} - set(eos_token_ids)
        )
        self._control_names = tuple(entry["content"] for entry in guarded if entry["id"] in self._control_ids)
        self._told_of_rendered = False
        named_eos = self._vocab.get(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids = list(dict.fromkeys([*eos_token_ids, *([] if named_eos is None else [named_eos])]))
        """Ids that end a sample: generation_config.json's (else config.json's), then the tokenizer's own."""
        self._kimi_k3_chat = model_type == "kimi_k3" and not chat_templates
        if self._kimi_k3_chat:
            kimi_k3.check_tokens(self._vocab, "the tokenizer")
            self.eos_token_ids = list(dict.fromkeys([*self.eos_token_ids, self._vocab[kimi_k3.END]]))
        self._templates: dict[str, ChatTemplate | deepseek_v32.DeepseekV32Format] = {
            name: ChatTemplate(text, self.named_tokens) for name, text in (chat_templates or {}).items()
        }
        if model_type == "deepseek_v32" and not chat_templates and self._vocab.keys() >= set(deepseek_v32.TOKENS):
            self._templates["default"] = deepseek_v32.DeepseekV32Format()
        self.message_format = format_for(model_type, self.template_source)
        """In which format the model writes reasoning and tool calls, for MessageParser."""

    @classmethod
    def from_folder(cls, path: str | Path, num_ids: int = 0) -> "Tokenizer | None":
        """The tokenizer of a model folder; None if it has neither tokenizer.json nor tiktoken.model. Raises ModelError for a broken one.

        `num_ids`: size of the model's table where that is padded; ids beyond the tokenizer's own decode to nothing.
        """
        folder = Path(path)
        spec, config = _read_json(folder / "tokenizer.json", _Spec), _read_json(folder / "tokenizer_config.json", _Config) or {}
        ranked = spec is None
        spec = tiktoken_spec(folder, config) if spec is None else spec
        if spec is None:
            return None
        config = (_read_json(folder / "special_tokens_map.json", _Config) or {}) | config
        model = _read_json(folder / "config.json") or {}
        eos: Any = (_read_json(folder / "generation_config.json") or {}).get("eos_token_id")
        eos = model.get("eos_token_id") if eos is None else eos
        eos = [eos] if isinstance(eos, int) else eos or []
        if not all(type(token) is int for token in eos):
            raise ModelError(f"{folder}: eos_token_id is an integer or a list of integers, got {eos!r:.100}")
        model_type = str(model.get("model_type", ""))
        guard_added = ranked or model_type in ("kimi_k3", "deepseek_v32")
        return cls(spec, config, eos, _read_templates(folder, config), num_ids, guard_added=guard_added, model_type=model_type)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text. `add_special_tokens`: what the tokenizer puts around a text (often BOS, often nothing).

        `parse_special=True`: names of control tokens in the text become those tokens, for text that a template has rendered.
        Raises RequestError (code `invalid_text`) for what is not text.
        """
        if parse_special:
            return _run(self._parsing, text, add_special_tokens).ids
        ids = self._spell(text, self._plain)
        if not self._told_of_rendered and text.startswith(self._control_names):
            self._told_of_rendered = True
            log.warning(
                "a text begins with the name of a control token, which stays text: %r; if you rendered it with a chat template, give the "
                "messages instead, or the ids of Tokenizer.encode(text, parse_special=True) (told once)",
                text[:32],
            )
        if not add_special_tokens:
            return ids
        around = _run(self._plain, text, True)
        head = next((i for i, added in enumerate(around.special_tokens_mask) if not added), len(around))
        tail = next((i for i, added in enumerate(reversed(around.special_tokens_mask)) if not added), 0)
        return around.ids[:head] + ids + around.ids[len(around) - tail :]

    def decode(self, ids: Iterable[int], show: Mapping[int, bytes] | None = None) -> str:
        """Text of the ids without control tokens but those in `show`; bytes that are not UTF-8 become U+FFFD."""
        pieces, shown = self.pieces, show or {}
        text = b"".join([pieces[token_id] or shown.get(token_id, b"") for token_id in ids]).decode(errors="replace")
        return text.removeprefix(" ") if self.drops_leading_space else text

    def control_tokens(self, names: Iterable[str]) -> dict[int, bytes]:
        """Id → text of the named tokens that decode would hide: what `show` takes."""
        ids = {name: self._vocab.get(name) for name in names}
        return {token_id: name.encode() for name, token_id in ids.items() if token_id is not None and token_id in self.special_ids}

    @property
    def template_source(self) -> str:
        """All chat templates as written: they tell which format the model answers in."""
        return "\n".join(template.source for template in self._templates.values())

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Ids of a chat. `variables` reach the template (`enable_thinking=False`). Raises RequestError.

        Equal to transformers' `apply_chat_template(..., tokenize=True)` unless a message contains the name of a control token: that
        stays text here. Variables that the template never reads are refused, and so are tools.
        """
        check_messages(messages)
        if self._kimi_k3_chat:
            return self._encode_k3(messages, tools, add_generation_prompt, variables)
        for_tools = bool(tools) and "tool_use" in self._templates
        template = self._templates.get("tool_use" if for_tools else "default")
        if template is None:
            raise RequestError("the model folder has no chat template; give text or token ids", code="no_chat_template")
        variables = template.settle(variables, bool(tools) and not for_tools)
        seam = self._new_seam([messages, with_arguments(messages, str), tools, variables])
        guarded = map_strings({"tools": tools, "variables": variables}, lambda text: self._break_special(text, seam))
        rendered = template.render(
            with_arguments(messages, lambda text: self._break_special(text, seam)),
            tools=guarded["tools"],
            add_generation_prompt=add_generation_prompt,
            variables=guarded["variables"],
        )
        return self._encode_rendered(rendered.split(seam))

    def _encode_k3(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool, variables: dict[str, Any]
    ) -> list[int]:
        ids: list[int] = []
        for segment in kimi_k3.render(with_arguments(messages, str), tools, add_generation_prompt, variables):
            if isinstance(segment, kimi_k3.Token):
                ids.append(self._vocab[segment.name])
            else:
                ids += self._spell(segment, self._plain)
        return ids

    def bad_word_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Token sequences that spell each word inside a text: as written, and after a space unless it starts with one."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for form in [word] if word[:1].isspace() else [word, " " + word]:
                ids = _run(self._inner, form, False).ids
                if not ids:
                    raise RequestError(f"bad word {word!r:.100} has no tokens", code="invalid_bad_words")
                found[tuple(ids)] = None
        return [list(ids) for ids in found]

    @cached_property
    def _decoding(self) -> tuple[list[bytes], bool]:
        pieces, drops_space = token_pieces(self._spec, self._vocab, self.special_ids)
        return pieces + [b""] * (self._num_ids - len(pieces)), drops_space

    @property
    def pieces(self) -> list[bytes]:
        """Bytes each id adds to a text; empty for control tokens."""
        return self._decoding[0]

    @property
    def drops_leading_space(self) -> bool:
        """Whether one space at the start of a text is an artefact of the tokenizer."""
        return self._decoding[1]

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to control tokens in text."""
        plain = _build(self._spec)
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """Blind to control tokens, and without the space that some tokenizers put before a text."""
        inner = _build(_without_prefix(self._spec))
        inner.encode_special_tokens = True
        return inner

    def _new_seam(self, values: Any) -> str:
        """A word that occurs nowhere in the values; letters only, so that it survives what templates do to text."""
        texts: list[str] = []
        map_strings(values, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
        joined, number = "\n".join(texts), 0
        while (seam := "qzseam" + "x" * number + "zq") in joined:
            number += 1
        return seam

    def _break_special(self, text: str, seam: str) -> str:
        """Put the seam inside every control token that the text would become."""
        if not text or self._is_harmless(text):
            return text
        while True:
            encoding = _run(self._parsing, text, False)
            spans = self._control_spans(encoding)
            if not spans:
                return text
            for start, end in reversed(spans):
                at = _inside(text, start, end)
                text = text[:at] + seam + text[at:]

    def _is_harmless(self, text: str) -> bool:
        """Whether a look at the names alone shows that no control token is in the text: most texts need not be encoded to find out."""
        return self._names is not None and (text.isascii() or not self._spec.get("normalizer")) and self._names.search(text) is None

    @cached_property
    def _names(self) -> re.Pattern[str] | None:
        """Finds the control tokens' names; None where a token can come of text in which its name does not stand.

        That is so with an unknown token, with normalizers that change ASCII, and with tokens that are looked for after normalising.
        """
        guarded = [entry for entry in self._spec["added_tokens"] if entry["id"] in self._control_ids]
        normalizers = {node.get("type") for node in _nodes(self._spec, "normalizer")} - {None, "NFC"}
        if (
            normalizers
            or any(entry.get("normalized", True) for entry in guarded)
            or _unknown_id(self._spec["model"], self._vocab) is not None
        ):
            return None
        return re.compile("|".join(re.escape(entry["content"]) for entry in guarded) or "(?!)")

    def _spell(self, text: str, encoder: tokenizers.Tokenizer) -> list[int]:
        """Ids without any control token, also where the vocabulary itself holds the name of one."""
        ids: list[int] = []
        pending = [(text, encoder)]
        while pending:
            text, encoder = pending.pop()
            encoding = _run(encoder, text, False)
            cuts = [_inside(text, start, end) for start, end in self._control_spans(encoding)]
            if not cuts:
                ids += encoding.ids
                continue
            parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            pending += reversed([(part, self._inner if i else encoder) for i, part in enumerate(parts)])
        return ids

    def _control_spans(self, encoding: tokenizers.Encoding) -> list[tuple[int, int]]:
        return [span for token_id, span in zip(encoding.ids, encoding.offsets, strict=True) if token_id in self._control_ids]

    def _encode_rendered(self, parts: list[str]) -> list[int]:
        """Encode the parts' concatenation; control tokens that lie across a border between parts are text."""
        text = "".join(parts)
        encoding = _run(self._parsing, text, False)
        borders, at = [], 0
        for part in parts[:-1]:
            at += len(part)
            borders.append(at)
        if not borders:
            return encoding.ids
        ids: list[int] = []
        run_start, run_ids, tainted = 0, list[int](), False

        def close(end: int) -> None:
            encoder = self._plain if run_start == 0 or not _prefixes_first_only(self._spec) else self._inner
            ids.extend(self._spell(text[run_start:end], encoder) if tainted else run_ids)

        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in self._control_ids:
                run_ids.append(token_id)
            elif any(start < border < end for border in borders):
                tainted = True
            else:
                close(start)
                ids.append(token_id)
                run_start, run_ids, tainted = end, [], False
        close(len(text))
        return ids


def _run(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    if not isinstance(text, str):
        raise RequestError(f"text is a string, got {type(text).__name__}", code="invalid_text")
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise RequestError("the text holds half of a surrogate pair; give valid Unicode", code="invalid_text") from error


def _build(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"tokenizer.json cannot be loaded: {error}") from error


def _inside(text: str, start: int, end: int) -> int:
    """A cut that takes the control token at text[start:end] apart (it may have swallowed spaces on its left)."""
    name = text[start:end]
    if len(name.strip()) < 2:
        raise RequestError(f"the text contains {name!r}, a control token that cannot be spelled otherwise; remove it", code="invalid_text")
    return start + len(name) - len(name.lstrip()) + 1


def _content(token: Any) -> str | None:
    """A named token of tokenizer_config.json is a string or an object."""
    return token.get("content") if isinstance(token, dict) else token


def _unknown_id(model: dict[str, Any], vocab: dict[str, int]) -> int | None:
    """What the vocabulary puts in place of text it cannot spell."""
    return model["unk_id"] if isinstance(model.get("unk_id"), int) else vocab.get(model.get("unk_token") or "")


def _nodes(spec: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers of a tokenizer.json, a sequence or a single one."""
    node = spec.get(part) or {}
    return node.get("normalizers") or node.get("pretokenizers") or [node]


def _prefixes_first_only(spec: dict[str, Any]) -> bool:
    return any(node.get("prepend_scheme") == "first" for node in _nodes(spec, "pre_tokenizer"))


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer.json, not putting a space before a text."""
    spec = json.loads(json.dumps(spec))
    for node in _nodes(spec, "pre_tokenizer"):
        if "prepend_scheme" in node:
            node["prepend_scheme"] = "never"
        if "add_prefix_space" in node:
            node["add_prefix_space"] = False
    for node in _nodes(spec, "normalizer"):
        if node.get("type") == "Prepend":
            node["prepend"] = ""
    return spec


class _Added(msgspec.Struct):
    content: str
    id: int
    special: bool


class _Spec(msgspec.Struct):
    """What is read of tokenizer.json here; the rest is for `tokenizers`."""

    added_tokens: list[_Added] = []
    decoder: dict[str, Any] | None = None


class _Marked(msgspec.Struct):
    content: str
    special: bool = False


class _Template(msgspec.Struct):
    name: str
    template: str


_Named = str | dict[str, Any] | bool | None


class _Config(msgspec.Struct):
    """What is read of tokenizer_config.json and special_tokens_map.json here."""

    added_tokens_decoder: dict[str, _Marked] = {}
    chat_template: str | list[_Template] | None = None
    bos_token: _Named = None
    eos_token: _Named = None
    unk_token: _Named = None
    sep_token: _Named = None
    pad_token: _Named = None
    cls_token: _Named = None
    mask_token: _Named = None


def _read_json(path: Path, shape: type = dict) -> dict[str, Any] | None:
    """The file's object, whose known fields have the types of `shape`; None if there is no file."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__}, not an object")
    try:
        msgspec.convert(values, shape)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}; copy the file again") from error
    return values


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template name → source: chat_template.jinja, else tokenizer_config.json's string or list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except ValueError as error:
            raise ModelError(f"{file} is not text: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if template else {}
