"""The service around the engine: prompts in, rollouts out, over ZeroMQ. PROTOCOL.md is the wire's specification.

Names are imported on first use: a driver that only needs RolloutClient starts in a fraction of a second and never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.client import AsyncRolloutClient
    from rollout.client_sync import RolloutClient
    from rollout.errors import (
        AdminError,
        ClosedError,
        ConnectError,
        DeadlineError,
        ProtocolError,
        RolloutError,
        SecurityError,
        ServiceLostError,
    )

_HOME = {
    "AsyncRolloutClient": "rollout.client",
    "RolloutClient": "rollout.client_sync",
    "AdminError": "rollout.errors",
    "ClosedError": "rollout.errors",
    "ConnectError": "rollout.errors",
    "DeadlineError": "rollout.errors",
    "ProtocolError": "rollout.errors",
    "RolloutError": "rollout.errors",
    "SecurityError": "rollout.errors",
    "ServiceLostError": "rollout.errors",
}
__all__ = [
    "AdminError",
    "AsyncRolloutClient",
    "ClosedError",
    "ConnectError",
    "DeadlineError",
    "ProtocolError",
    "RolloutClient",
    "RolloutError",
    "SecurityError",
    "ServiceLostError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
