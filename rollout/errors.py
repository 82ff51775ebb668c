"""Errors a user of the service or client meets. In: nothing. Out: exception classes. Never imports torch.

BatchGenError
└── RolloutError                   base of everything raised by rollout
    ├── ProtocolError(ValueError)  a peer sent something that is not in PROTOCOL.md; names the frame and the limit
    ├── SecurityError              keys missing, unreadable, too open, or a bind that needs keys
    ├── ConnectError               no welcome before the deadline, or the service refused this peer
    ├── ServiceLostError           the service stopped answering while a call waited (retryable)
    ├── DeadlineError              the caller's timeout_s passed (retryable)
    ├── ClosedError                the client was closed while or before the call
    └── AdminError                 an admin call failed on the service; carries its code
"""

from batchgen.errors import BatchGenError, ErrorInfo


class RolloutError(BatchGenError):
    code = "rollout_error"


class ProtocolError(RolloutError, ValueError):
    code = "protocol_error"


class SecurityError(RolloutError):
    code = "security_error"


class ConnectError(RolloutError):
    code = "connect_failed"
    retryable = True


class ServiceLostError(RolloutError):
    code = "service_lost"
    retryable = True


class DeadlineError(RolloutError):
    code = "deadline"
    retryable = True


class ClosedError(RolloutError):
    code = "client_closed"


class AdminError(RolloutError):
    code = "admin_error"

    @classmethod
    def of(cls, info: ErrorInfo) -> "AdminError":
        return cls(info.message, code=info.code, retryable=info.retryable)
