"""One torch thread: small tensors gain nothing from more, and test processes share the machine. GPU kernels run in Triton's interpreter."""

import importlib.util
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
collect_ignore = [] if importlib.util.find_spec("triton") else ["test_gpu.py"]


@pytest.fixture(scope="module", params=["kernels", "torch"])
def products(request):
    """Both ways a CPU computes: with the compiled kernels, and on a machine without a compiler."""
    from batchgen.kernels import cpu

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(cpu, "load", lambda: None)
        elif cpu.load() is None:
            pytest.skip("needs a C compiler")
        yield request.param


@pytest.fixture
def on_send(monkeypatch):
    """Sets what a faked channel does with each frame."""
    from fake_weight_sync import FakeChannel

    return lambda function: monkeypatch.setattr(FakeChannel, "on_send", staticmethod(function))


@pytest.fixture
def on_wait(monkeypatch):
    """Sets what happens while the publisher waits."""
    from fake_weight_sync import FakeChannel

    return lambda function: monkeypatch.setattr(FakeChannel, "on_wait", staticmethod(function))
