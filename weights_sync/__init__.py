"""In-place weight updates: a trainer's tensors in, the same weights on every node, all or nothing. Sees the engine through a Protocol only.

Names are imported on first use: the service's process, which uses the coordinator, never pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weights_sync.channel import ZmqChannel
    from weights_sync.coordinator import Coordinator
    from weights_sync.publisher import PushReport, WeightPublisher
    from weights_sync.receiver import WeightReceiver

_HOME = {
    "Coordinator": "weights_sync.coordinator",
    "PushReport": "weights_sync.publisher",
    "WeightPublisher": "weights_sync.publisher",
    "WeightReceiver": "weights_sync.receiver",
    "ZmqChannel": "weights_sync.channel",
}
__all__ = ["Coordinator", "PushReport", "WeightPublisher", "WeightReceiver", "ZmqChannel"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weights_sync' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
