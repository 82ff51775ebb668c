"""Kimi-K3 against the plain reference beside, which was written apart from it, and against itself however the work is cut."""

import pytest
import torch
from kimi_k3_reference import Reference, random_weights, tiny_config, write_checkpoint
from model_checks import CUTS, PROMPTS, assert_results_do_not_depend_on, assert_samples_of_a_group_are_those_of_lone_requests, make
from tiny_models import Runner

from batchgen import SamplingParams
from batchgen.errors import ModelError
from batchgen.models.matrix import tolerance_of
from batchgen.models.registry import load_model

VARIANTS = {
    "as released": {},
    "one block": {"attn_res_block_size": 93},
    "a block for each layer": {"attn_res_block_size": 1},
    "a plain residual stream": {"attn_res_block_size": None},
    "experts in the model's own space": {"routed_expert_hidden_size": None},
    "no norm of the latent": {"latent_moe_use_norm": False},
    "queries without a latent": {"q_lora_rank": None},
    "no gates of attention": {"mla_use_output_gate": False},
    "narrow gates of KDA": {"use_full_rank_gate": False},
    "unbounded decay": {"gate_lower_bound": None},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    config = tiny_config()
    weights = random_weights(config, 0)
    return write_checkpoint(tmp_path_factory.mktemp("k3"), config, weights), Reference(config, weights, torch.float64)


def assert_logits_equal(folder, reference) -> None:
    loaded = load_model(str(folder), "float32", "cpu", deterministic=False)
    got = Runner(loaded, len(PROMPTS)).step(dict(enumerate(PROMPTS)))
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(got[i].double(), reference.logits(prompt), atol=tolerance_of(loaded.config.architecture), rtol=0)


@pytest.mark.usefixtures("products")
def test_logits_equal_the_reference(made):
    assert_logits_equal(*made)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_the_reference(tmp_path, variant):
    config = tiny_config(**VARIANTS[variant])
    weights = random_weights(config, 0)
    assert_logits_equal(write_checkpoint(tmp_path, config, weights), Reference(config, weights, torch.float64))


def test_greedy_tokens_equal_the_reference_over_64_steps_and_so_do_its_routers_choices(made):
    folder, reference = made
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, return_routed_experts=True)
    for prompt, group in zip(PROMPTS, make(folder).generate(PROMPTS[:3], params), strict=False):
        ids = prompt + group.samples[0].token_ids
        assert group.samples[0].token_ids == reference.logits(ids).argmax(-1)[len(prompt) - 1 : -1].tolist()
        got = torch.from_numpy(group.samples[0].routed_experts).long().transpose(0, 1)
        assert torch.equal(got.sort(-1).values, torch.as_tensor(reference.routed(ids[:-1])).sort(-1).values)


@pytest.mark.parametrize("cut", CUTS)
def test_results_are_the_same_bit_for_bit_however_the_work_is_cut(made, cut):
    assert_results_do_not_depend_on(CUTS[cut], made[0])


def test_samples_that_share_a_prompt_are_those_that_do_not_bit_for_bit(made):
    assert_samples_of_a_group_are_those_of_lone_requests(made[0])


def test_a_trainers_tensors_under_the_checkpoints_names_are_an_update(tmp_path, made):
    config = tiny_config()
    weights = random_weights(config, 2)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = make(write_checkpoint(tmp_path, config, weights)).generate(PROMPTS, params)
    llm = make(made[0])
    llm.update_weights(weights.items(), version=1)
    for got, want in zip(llm.generate(PROMPTS, params), expected, strict=True):
        assert got.samples[0].token_ids == want.samples[0].token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_layers": [1, 2, 3]}, "full_attn_layers and kda_layers of linear_attn_config name layers 1..7 once each"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"attn_res_block_size": 0}, "block_size is a positive integer"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"head_dim": "wide"}, "head_dim is a positive integer"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(tmp_path, changes, message):
    config = tiny_config()
    folder = write_checkpoint(tmp_path, tiny_config(**changes), random_weights(config, 0))
    with pytest.raises(ModelError, match=message):
        make(folder)
