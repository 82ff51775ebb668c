"""One torch thread: small tensors gain nothing from more, and test processes share the machine."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
