"""Quantised checkpoints on a GPU: the CPU's tokens, before and after an update, and packed in the GPU's memory."""

import pytest
import torch
from model_checks import CUTS, PROMPTS, assert_results_do_not_depend_on, make
from quantised_models import KINDS, checkpoints
from safetensors.torch import load_file

from batchgen import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    packed, _, source = checkpoints(request.param, tmp_path_factory.mktemp(request.param))
    return packed, load_file(source / "model.safetensors")


def test_greedy_tokens_are_the_cpus_and_so_they_are_after_an_update(made):
    packed, tensors = made
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    on_cpu, on_gpu = (make(packed, device=device) for device in ("cpu", "cuda"))
    for version in range(2):
        for want, got in zip(on_cpu.generate(PROMPTS, params), on_gpu.generate(PROMPTS, params), strict=True):
            assert got.samples[0].token_ids == want.samples[0].token_ids
            assert got.samples[0].logprobs == pytest.approx(want.samples[0].logprobs, abs=2e-3)
        for llm in (on_cpu, on_gpu):
            llm.update_weights(((name, tensor.flip(0)) for name, tensor in tensors.items()), version=version + 1)


def test_weights_are_as_large_as_on_a_cpu(made):
    sizes = [make(made[0], device=device, dtype="bfloat16").engine.memory.weights_bytes for device in ("cpu", "cuda")]
    assert sizes[0] == sizes[1]


def test_bfloat16_gives_finite_tokens(made):
    params = SamplingParams(n=3, max_tokens=32, ignore_eos=True)
    for group in make(made[0], device="cuda", dtype="bfloat16").generate(PROMPTS, params):
        assert all(len(sample.token_ids) == 32 and sample.error is None for sample in group.samples)


@pytest.mark.parametrize("cut", CUTS)
def test_deterministic_results_do_not_depend_on_the_batch(made, cut):
    assert_results_do_not_depend_on(CUTS[cut], made[0], device="cuda")
