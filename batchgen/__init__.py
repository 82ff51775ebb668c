"""The engine: prompts (token ids) in, completions (token ids, logprobs, provenance) out. Never opens a socket.

Names are imported on first use, so that drivers which only need `SamplingParams` never pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.chat import ChatPrompt
    from batchgen.config import EngineConfig
    from batchgen.engine import Engine
    from batchgen.errors import BatchGenError, ErrorInfo, RequestError
    from batchgen.llm import LLM
    from batchgen.outputs import Group, Sample
    from batchgen.sampling_params import SamplingParams

_HOME = {
    "ChatPrompt": "batchgen.chat",
    "LLM": "batchgen.llm",
    "Engine": "batchgen.engine",
    "EngineConfig": "batchgen.config",
    "SamplingParams": "batchgen.sampling_params",
    "Group": "batchgen.outputs",
    "Sample": "batchgen.outputs",
    "BatchGenError": "batchgen.errors",
    "RequestError": "batchgen.errors",
    "ErrorInfo": "batchgen.errors",
}
__all__ = ["LLM", "BatchGenError", "ChatPrompt", "Engine", "EngineConfig", "ErrorInfo", "Group", "RequestError", "Sample", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("batchgen")
    if name not in _HOME:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
