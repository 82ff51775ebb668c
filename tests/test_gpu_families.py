"""Every family on a GPU: in float32 the same greedy tokens as on a CPU, in deterministic mode the same bits whatever the batch."""

import pytest
import torch
from kimi_k3_reference import random_weights, tiny_config, write_checkpoint
from model_checks import CUTS, PROMPTS, assert_results_do_not_depend_on, make
from tiny_models import FAMILIES, tiny_model

from batchgen import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=[*FAMILIES, "kimi_k3"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "kimi_k3":
        config = tiny_config()
        return write_checkpoint(path, config, random_weights(config, 0))
    return tiny_model(request.param, path)


def test_greedy_tokens_are_the_cpus(folder):
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    on_cpu, on_gpu = (make(folder, device=device).generate(PROMPTS, params) for device in ("cpu", "cuda"))
    for want, got in zip(on_cpu, on_gpu, strict=True):
        assert got.samples[0].token_ids == want.samples[0].token_ids
        assert got.samples[0].logprobs == pytest.approx(want.samples[0].logprobs, abs=2e-3)


def test_bfloat16_gives_finite_tokens(folder):
    params = SamplingParams(n=3, max_tokens=48, ignore_eos=True)
    for group in make(folder, device="cuda", dtype="bfloat16").generate(PROMPTS, params):
        assert all(len(sample.token_ids) == 48 and sample.error is None for sample in group.samples)


@pytest.mark.parametrize("cut", CUTS)
def test_deterministic_results_do_not_depend_on_the_batch(folder, cut):
    assert_results_do_not_depend_on(CUTS[cut], folder, device="cuda")
