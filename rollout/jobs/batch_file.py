"""Lines of a batch file into requests. In: a JSONL file. Out: one Row or BadRow per line. Never imports torch or holds the file."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from batchgen.chat import ChatPrompt, check_messages, template_message
from batchgen.sampling_params import SamplingParams
from batchgen.text.prompts import misplaced
from rollout.jobs.errors import JobRefused
from rollout.jobs.sampling_fields import Wishes, canonical, wishes

MAX_LINE_BYTES = 16 << 20
"""Longest line that is read as a request; a longer one is an error row."""
MAX_ID_CHARS = 512
MAX_METADATA_LEVELS = 32
ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

Prompt = str | list[int] | list[dict[str, Any]] | ChatPrompt
"""Text, token ids, or chat messages, alone or with tools and template controls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of the file, ready to be generated."""

    line: int
    """1-based line number in the input file."""
    custom_id: str
    kind: Literal["chat", "completion"]
    prompt: Prompt
    params: SamplingParams
    want_logprobs: bool
    want_token_ids: bool
    metadata: Any
    """The row's own `metadata`, copied to its result."""

    def key(self) -> bytes:
        """16 bytes that two rows share exactly when prompt and sampling are the same."""
        what = (self.kind, self.prompt, self.params, self.want_logprobs, self.want_token_ids)
        text = msgspec.json.encode(msgspec.to_builtins(what, str_keys=True), order="sorted")
        return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A line that cannot be a request, and why."""

    line: int
    custom_id: str
    code: str
    message: str


class BatchFile:
    """Iterates a JSONL file's non-blank lines as (line number, bytes without line end); `None` in place of an over-long line.

    A byte-order mark and CRLF line ends are accepted. `digest()` covers the bytes iterated so far.
    """

    def __init__(self, path: Path):
        self.path = path
        self._digest = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        self._digest = hashlib.blake2b(digest_size=16)
        with self.path.open("rb") as file:
            number = 0
            while chunk := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                self._digest.update(chunk)
                too_long = len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n")
                while chunk and not chunk.endswith(b"\n") and too_long:
                    chunk = file.readline(MAX_LINE_BYTES)
                    self._digest.update(chunk)
                if too_long:
                    yield number, None
                    continue
                text = chunk.removeprefix(b"\xef\xbb\xbf") if number == 1 else chunk
                if text := text.strip(b" \t\r\n"):
                    yield number, text

    def digest(self) -> str:
        return self._digest.hexdigest()

    def line(self, wanted: int) -> bytes | None:
        """One line's bytes, by number."""
        return next(raw for number, raw in self if number == wanted)


def parse_line(line: int, raw: bytes | None, defaults: dict[str, Any]) -> Row | BadRow:
    """The request on a line. `defaults` are command-line sampling fields in canonical form."""
    if raw is None:
        return BadRow(
            line=line,
            custom_id=f"line-{line}-too-long",
            code="line_too_long",
            message=f"the line has more than {MAX_LINE_BYTES} bytes, the most that is read as one request; shorten it",
        )
    own_id = stable_id(line, raw)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        hint = "; NaN and Infinity are not JSON" if b"NaN" in raw or b"Infinity" in raw else ""
        return BadRow(line=line, custom_id=own_id, code="invalid_json", message=f"the line is not JSON: {error}{hint}")
    custom_id = own_id
    try:
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict):
            raise ValueError(f"a line is a JSON object or a string (the prompt), got {raw[:60].decode(errors='replace')}")
        custom_id = _custom_id(value, own_id)
        kind, prompt, fields, metadata = _openai_line(value) if "body" in value or "url" in value else _plain_line(value)
        wish = wishes(defaults, canonical(fields))
        if wish.tools or wish.template_kwargs:
            prompt = _with_tools(prompt, wish)
        if _too_deep(metadata, MAX_METADATA_LEVELS):
            raise ValueError(f"metadata nests deeper than {MAX_METADATA_LEVELS} levels; flatten it")
    except ValueError as error:
        return BadRow(line=line, custom_id=custom_id, code="invalid_request", message=str(error))
    return Row(
        line=line,
        custom_id=custom_id,
        kind=kind,
        prompt=prompt,
        params=wish.params,
        want_logprobs=wish.want_logprobs,
        want_token_ids=wish.want_token_ids,
        metadata=metadata,
    )


def _with_tools(prompt: Prompt, wish: Wishes) -> ChatPrompt:
    if not isinstance(prompt, list) or not isinstance(prompt[0], dict):
        raise misplaced(prompt, "tools" if wish.tools else "chat_template_kwargs")
    return ChatPrompt(messages=prompt, tools=wish.tools or [], chat_template_kwargs=wish.template_kwargs)


def stable_id(line: int, raw: bytes) -> str:
    """The id of a row that brings none: the same file gives the same ids."""
    return f"line-{line}-{hashlib.blake2b(raw, digest_size=6).hexdigest()}"


def _custom_id(value: dict[str, Any], own_id: str) -> str:
    names = [name for name in ("custom_id", "id") if value.get(name) is not None]
    if not names:
        if "body" in value:
            raise ValueError("custom_id is missing; every batch line names its request")
        return own_id
    if len(names) == 2:
        raise ValueError("the line has both custom_id and id; give one of them")
    found = value[names[0]]
    if type(found) is int:
        found = str(found)
    if not isinstance(found, str) or not 0 < len(found) <= MAX_ID_CHARS:
        raise ValueError(f"{names[0]} is a string of 1 to {MAX_ID_CHARS} characters or an integer, got {found!r:.100}")
    return found


def _openai_line(value: dict[str, Any]) -> tuple[Literal["chat", "completion"], Prompt, dict[str, Any], Any]:
    if unknown := value.keys() - {"custom_id", "id", "method", "url", "body", "metadata"}:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r} beside body; sampling fields belong inside body, your own data in metadata")
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method is POST, got {value['method']!r:.100}")
    url = value.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise ValueError(f"url is one of {', '.join(ENDPOINTS)}, got {url!r:.100}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise ValueError(f"body is an object, got {body!r:.100}")
    fields = dict(body)
    metadata = fields.pop("metadata", value.get("metadata"))
    if ENDPOINTS[url] == "chat":
        return "chat", _messages(fields.pop("messages", None)), fields, metadata
    return "completion", _prompt(fields.pop("prompt", None)), fields, metadata


def _plain_line(value: dict[str, Any]) -> tuple[Literal["chat", "completion"], Prompt, dict[str, Any], Any]:
    fields = {name: item for name, item in value.items() if name not in ("custom_id", "id")}
    metadata = fields.pop("metadata", None)
    given = [name for name in ("prompt", "messages", "prompt_token_ids") if name in fields]
    if len(given) != 1:
        raise ValueError(f"a plain line has exactly one of prompt, messages and prompt_token_ids, got {', '.join(given) or 'none of them'}")
    content = fields.pop(given[0])
    if given[0] == "messages":
        return "chat", _messages(content), fields, metadata
    if given[0] == "prompt_token_ids" and not isinstance(content, list):
        raise ValueError(f"prompt_token_ids is a list of integers, got {content!r:.100}")
    return "completion", _prompt(content), fields, metadata


def _prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, list) and prompt and all(type(token) is int and -(1 << 63) <= token < 1 << 63 for token in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise ValueError(f"prompt is a list of {len(prompt)} prompts; write one line for each")
    if isinstance(prompt, str) and prompt:
        return prompt
    raise ValueError(f"prompt is a non-empty string or list of token ids, got {prompt!r:.100}")


def _messages(messages: Any) -> list[dict[str, Any]]:
    return [template_message(message) for message in check_messages(messages)]


def _too_deep(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_too_deep(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


def check_input(path: Path) -> None:
    """JobRefused unless the path is a regular file: the job reads it twice and again after a crash."""
    if not path.exists():
        raise JobRefused(f"input {path} does not exist")
    if not path.is_file():
        raise JobRefused(f"input {path} is not a regular file; the job reads it more than once, so save the rows to a file first")


def with_id(raw: bytes, custom_id: str) -> bytes:
    """An input line that says its id; a line that is no JSON object or string is kept as it is."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return raw
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or value.get("custom_id") is not None or value.get("id") is not None:
        return raw
    return msgspec.json.encode({"custom_id": custom_id, **{name: item for name, item in value.items() if name not in ("custom_id", "id")}})
