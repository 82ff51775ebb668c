"""Error tree of the engine. In: nothing. Out: exception classes and their wire form. Never imports torch.

BatchGenError(Exception)         everything we raise on purpose
├── RequestError(ValueError)     one prompt or its parameters cannot be served; that row fails alone
├── ModelError(ValueError)       a checkpoint folder cannot be loaded
├── WeightUpdateError(ValueError) pushed weights were refused; the old version still serves
└── MemoryPlanError(ValueError)  the model or one sequence does not fit the stated budget
"""

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An error as data: inside a Sample, on the wire, in a result row."""

    code: str
    """Stable machine-readable name, for example `prompt_too_long`."""
    message: str
    """What was wrong, what was got, the limit, and what to do."""
    retryable: bool = False
    """Whether the same request may succeed when sent again."""


class BatchGenError(Exception):
    """Base of every deliberate error. `code` is stable, `retryable` says whether trying again can help."""

    code = "error"
    retryable = False

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None, request_id: str | None = None):
        super().__init__(message)
        self.message = message
        self.code = self.code if code is None else code
        self.retryable = self.retryable if retryable is None else retryable
        self.request_id = request_id

    def info(self) -> ErrorInfo:
        """The same error as data."""
        return ErrorInfo(code=self.code, message=self.message, retryable=self.retryable)


class RequestError(BatchGenError, ValueError):
    code = "invalid_request"


class ModelError(BatchGenError, ValueError):
    code = "model_error"


class WeightUpdateError(BatchGenError, ValueError):
    code = "weight_update_refused"


class MemoryPlanError(BatchGenError, ValueError):
    code = "memory_plan"
