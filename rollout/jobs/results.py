"""Result rows. In: a Row and its Group, or why it failed. Out: ResultRow, the one schema of every output line. Never imports torch."""

import hashlib
from typing import Any

import msgspec

from batchgen.chat import ChatPrompt
from batchgen.errors import ErrorInfo
from batchgen.events import ModelFacts
from batchgen.outputs import Group, Sample
from rollout.jobs.batch_file import BadRow, Row


class Choice(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    message: dict[str, Any] | None
    """OpenAI's, for chat rows: role, content, and reasoning_content and tool_calls where there are any."""
    text: str | None
    """The text for completion rows."""
    finish_reason: str
    """stop, length, abort or error; length means the text is cut off."""
    stop_match: str | int | None
    detail: str | None
    seed: str
    """64-bit seed in decimal; a string because most JSON readers round integers that large."""
    weights_versions: list[tuple[int, int, int]]
    """(version, start, end) over the output tokens."""
    token_ids: list[int] | None
    """Output ids, with `return_token_ids`."""
    logprobs: dict[str, Any] | None
    """OpenAI's shape, with `logprobs`; tokens are named `token_id:N`."""
    error: ErrorInfo | None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_prompt_tokens: int


class Body(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Response(msgspec.Struct, kw_only=True):
    status_code: int
    request_id: str
    body: Body


class Provenance(msgspec.Struct, kw_only=True):
    """Where a row comes from: enough to make it again."""

    line: int
    """Line of the input file."""
    model_fingerprint: str | None = None
    engine_version: str | None = None
    sampling: dict[str, Any] | None = None
    """SamplingParams that differ from the defaults, the seed included."""
    tools: list[str] | None = None
    """Names of the tools the model was shown."""
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs_mode: str | None = None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float]] | None = None
    attempts: int = 0
    seconds: float | None = None
    reused_from: str | None = None
    """custom_id of the identical row whose result this is (`--dedupe exact`)."""


class ResultRow(msgspec.Struct, kw_only=True):
    """One line of the output file. `error` is null exactly when every sample of the row is whole."""

    id: str
    custom_id: str
    response: Response | None
    error: ErrorInfo | None
    provenance: Provenance
    metadata: Any = None


def result_row(row: Row, group: Group, facts: ModelFacts, *, engine_version: str, created: int, attempts: int, seconds: float) -> ResultRow:
    """A finished group as an output line."""
    completion_tokens = sum(len(sample.token_ids) for sample in group.samples)
    prompt_tokens = len(group.prompt_token_ids)
    failed = [sample for sample in group.samples if sample.finish_reason in ("error", "abort")]
    body = Body(
        id=_result_id(row.custom_id),
        object="chat.completion" if row.kind == "chat" else "text_completion",
        created=created,
        model=facts.name,
        choices=[_choice(row, sample) for sample in group.samples],
        usage=Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            cached_prompt_tokens=group.num_cached_tokens,
        ),
    )
    return ResultRow(
        id=body.id,
        custom_id=row.custom_id,
        response=None if len(failed) == len(group.samples) else Response(status_code=200, request_id=body.id, body=body),
        error=_group_error(failed, len(group.samples)),
        provenance=Provenance(
            line=row.line,
            model_fingerprint=facts.fingerprint,
            engine_version=engine_version,
            sampling=msgspec.to_builtins(row.params, str_keys=True),
            tools=_tool_names(row.prompt),
            chat_template_kwargs=row.prompt.chat_template_kwargs or None if isinstance(row.prompt, ChatPrompt) else None,
            logprobs_mode=group.logprobs_mode,
            prompt_token_ids=group.prompt_token_ids if row.want_token_ids else None,
            prompt_logprobs=group.prompt_logprobs,
            prompt_top_logprobs=group.prompt_top_logprobs,
            attempts=attempts,
            seconds=round(seconds, 4),
        ),
        metadata=row.metadata,
    )


def failed_row(row: Row | BadRow, error: ErrorInfo, *, attempts: int = 0, seconds: float | None = None) -> ResultRow:
    """A row that has no response."""
    return ResultRow(
        id=_result_id(row.custom_id),
        custom_id=row.custom_id,
        response=None,
        error=error,
        provenance=Provenance(line=row.line, attempts=attempts, seconds=seconds),
        metadata=row.metadata if isinstance(row, Row) else None,
    )


def reused_row(row: Row, original: ResultRow) -> ResultRow:
    """The result of an identical row under this row's name."""
    provenance = msgspec.structs.replace(original.provenance, line=row.line, reused_from=original.custom_id)
    return msgspec.structs.replace(
        original, id=_result_id(row.custom_id), custom_id=row.custom_id, provenance=provenance, metadata=row.metadata
    )


def _tool_names(prompt: Any) -> list[str] | None:
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    return [tool["function"]["name"] for tool in tools] if tools else None


def _result_id(custom_id: str) -> str:
    return "batch_req_" + hashlib.blake2b(custom_id.encode(), digest_size=12).hexdigest()


def _group_error(failed: list[Sample], num_samples: int) -> ErrorInfo | None:
    if not failed:
        return None
    first = failed[0].error or ErrorInfo(code="aborted", message="the sample was aborted before it was finished", retryable=True)
    if len(failed) == num_samples:
        return first
    message = f"{len(failed)} of {num_samples} samples have no whole result (see their choices); the first: {first.message}"
    return ErrorInfo(code="partial", message=message, retryable=first.retryable)


def _choice(row: Row, sample: Sample) -> Choice:
    chat = row.kind == "chat"
    return Choice(
        index=sample.index,
        message=_message(sample) if chat else None,
        text=None if chat else sample.text,
        finish_reason=sample.finish_reason,
        stop_match=sample.stop_match,
        detail=sample.detail,
        seed=str(sample.seed),
        weights_versions=sample.weights_versions,
        token_ids=sample.token_ids if row.want_token_ids else None,
        logprobs=_logprobs(sample, chat) if row.want_logprobs else None,
        error=sample.error,
    )


def _message(sample: Sample) -> dict[str, Any]:
    return {"role": "assistant", "content": sample.text} if sample.message is None else sample.message.as_openai()


def _logprobs(sample: Sample, chat: bool) -> dict[str, Any]:
    tops = sample.top_logprobs or [{}] * len(sample.token_ids)
    if chat:
        return {
            "content": [
                {
                    "token": _token(token_id),
                    "logprob": logprob,
                    "bytes": None,
                    "top_logprobs": [{"token": _token(i), "logprob": value, "bytes": None} for i, value in top.items()],
                }
                for token_id, logprob, top in zip(sample.token_ids, sample.logprobs, tops, strict=True)
            ]
        }
    return {
        "tokens": [_token(token_id) for token_id in sample.token_ids],
        "token_logprobs": sample.logprobs,
        "top_logprobs": [{_token(i): value for i, value in top.items()} for top in tops],
    }


def _token(token_id: int) -> str:
    return f"token_id:{token_id}"
