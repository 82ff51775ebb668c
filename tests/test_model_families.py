"""Every family against transformers on small random checkpoints in float32, and against itself however the work is cut."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from model_checks import CUTS, PROMPTS, assert_results_do_not_depend_on, assert_samples_of_a_group_are_those_of_lone_requests, make
from released_models import released_models
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, Runner, tiny_model

from batchgen import SamplingParams
from batchgen.errors import ModelError
from batchgen.models.matrix import cache_table, support_matrix, tolerance_of
from batchgen.models.registry import load_model
from weights_sync.mapping import resolve

MOE = [family for family in FAMILIES if family not in ("qwen3", "llama")]
VARIANTS = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3_biases": ("qwen3", {"attention_bias": True}),
    "olmoe_biases": ("olmoe", {"attention_bias": True, "clip_qkv": None, "norm_topk_prob": True}),
    "qwen2_without_bias": ("qwen2_moe", {"qkv_bias": False, "norm_topk_prob": True}),
    "qwen2_dense_layers": ("qwen2_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "mixtral_window_over_the_context": ("mixtral", {"sliding_window": 512}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e3,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "queries_without_a_latent": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": False}),
    "latent_biases": ("deepseek_v3", {"attention_bias": True, "rope_interleave": False, "norm_topk_prob": False}),
    "greedy_routing": ("deepseek_v2", {"topk_method": "greedy"}),
    "latent_yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "yarn_mscale": (
        "qwen3_moe",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


def transformers_model(folder):
    architecture = json.loads((Path(folder) / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


def assert_logits_equal(folder) -> None:
    loaded = load_model(str(folder), "float32", "cpu", deterministic=False)
    tolerance = tolerance_of(loaded.config.architecture)
    got = Runner(loaded, len(PROMPTS)).step(dict(enumerate(PROMPTS)))
    reference = transformers_model(folder)
    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            torch.testing.assert_close(got[i], reference(torch.tensor([prompt])).logits[0], atol=tolerance, rtol=0)


def chosen_experts(reference, ids: list[int]) -> list[torch.Tensor]:
    """What each router of a transformers model chooses for each token."""
    chosen: list[torch.Tensor] = []
    routers = [module for module in reference.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(lambda _, __, output: chosen.append(output[-1].view(len(ids), -1))) for router in routers]
    with torch.no_grad():
        reference(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return chosen


@pytest.mark.usefixtures("products")
def test_logits_equal_transformers(folder):
    assert_logits_equal(folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_variants_equal_transformers(tmp_path, variant):
    family, overrides = VARIANTS[variant]
    assert_logits_equal(tiny_model(family, tmp_path, **overrides))


def test_greedy_tokens_equal_transformers_over_64_steps(folder):
    reference = transformers_model(folder)
    groups = make(folder).generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for prompt, group in zip(PROMPTS, groups, strict=False):
        with torch.no_grad():
            out = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False, max_new_tokens=64,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert group.samples[0].token_ids == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("cut", CUTS)
def test_results_are_the_same_bit_for_bit_however_the_work_is_cut(folder, cut):
    assert_results_do_not_depend_on(CUTS[cut], folder)


def test_samples_that_share_a_prompt_are_those_that_do_not_bit_for_bit(folder):
    assert_samples_of_a_group_are_those_of_lone_requests(folder)


@pytest.mark.parametrize("family", MOE)
def test_routed_experts_equal_the_reference_router(tmp_path, family):
    folder = tiny_model(family, tmp_path)
    reference, params = transformers_model(folder), SamplingParams(max_tokens=9, ignore_eos=True, return_routed_experts=True)
    for group in make(folder).generate(PROMPTS, params):
        ids = group.prompt_token_ids + group.samples[0].token_ids
        want = torch.stack(chosen_experts(reference, ids[:-1]), 1)
        assert torch.equal(torch.from_numpy(group.samples[0].routed_experts).long().sort(-1).values, want.sort(-1).values)


@pytest.mark.parametrize("family", MOE)
def test_a_trainers_stacked_tensors_and_a_checkpoints_are_the_same_update(tmp_path, family):
    old, new = tiny_model(family, tmp_path / "old"), tiny_model(family, tmp_path / "new", seed=1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = make(new).generate(PROMPTS, params)
    llm = make(old)
    llm.update_weights(transformers_model(new).state_dict().items(), version=1)
    for got, want in zip(llm.generate(PROMPTS, params), expected, strict=True):
        assert got.samples[0].token_ids == want.samples[0].token_ids


@pytest.mark.parametrize("source", ["model", "file"])
@pytest.mark.parametrize("family", MOE)
def test_a_publisher_finds_every_parameter_in_a_trainers_model_and_in_its_file(tmp_path, family, source):
    new = tiny_model(family, tmp_path / "new", seed=1)
    want = load_model(str(new), "float32", "cpu", deterministic=False).store
    got = load_model(str(tiny_model(family, tmp_path / "old")), "float32", "cpu", deterministic=False).store
    tensors = transformers_model(new).state_dict() if source == "model" else load_file(new / "model.safetensors")
    found = resolve({name: tuple(tensor.shape) for name, tensor in tensors.items()}, got.specs)
    assert not found.faults and not found.must_equal
    stage = got.open(1)
    for pick in found.picks:
        stage.put(pick.name, tensors[pick.source][pick.index])
    stage.commit()
    assert all(map(torch.equal, got.table.storages(), want.table.storages()))


def test_kimi_k25_loads_under_the_hubs_names_as_under_transformers(tmp_path):
    """The hub has `layers` where transformers writes `blocks`, and a projector without its `model.` prefix."""
    folder = tiny_model("kimi_k25", tmp_path)
    before = make(folder).generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    tensors = load_file(folder / "model.safetensors")
    assert "language_model.model.blocks.1.mlp.gate.weight" in tensors and "model.mm_projector.pre_norm.weight" in tensors
    hub = {name.replace("model.blocks.", "model.layers.").removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(hub, folder / "model.safetensors", metadata={"format": "pt"})
    after = make(folder).generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [group.samples[0].token_ids for group in after] == [group.samples[0].token_ids for group in before]


def test_a_window_shorter_than_the_context_is_refused(tmp_path):
    with pytest.raises(ModelError, match="sliding_window is 100, shorter than the context of 512"):
        make(tiny_model("mixtral", tmp_path, sliding_window=100))


def test_the_readmes_tables_of_models_are_what_the_registry_and_the_cache_layouts_say():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert support_matrix() in readme
    assert cache_table(released_models()) in readme
