"""The plain Kimi-K3 reference against what exists apart from it: transformers' Kimi-Linear and GLM-5-Next, the release's tensors."""

import json
import random

import pytest
import torch
from kimi_k3_reference import KEPT_IN_FLOAT32, PREFIX, Reference, random_weights, tiny_config, weight_shapes, write_checkpoint
from safetensors.torch import load_file, save_file

TOKENS = random.Random(5).choices(range(260), k=75)
LINEAR = {
    "hidden_act": "silu",
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "gate_lower_bound": None,
    "use_full_rank_gate": False,
    "mla_use_output_gate": False,
}
"""What makes a Kimi-Linear of it."""


def kimi_linear(folder, config, weights):
    """transformers' model of a Kimi-Linear checkpoint with our names."""
    from transformers import KimiLinearForCausalLM

    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    own = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in weights.items()}
    for name in [name for name in own if name.endswith("A_log")]:
        own[name] = own[name][:heads].view(1, 1, heads, 1).clone()
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config["text_config"]))
    model, info = KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_without_its_own_parts_it_is_transformers_kimi_linear(tmp_path, q_lora_rank):
    config = tiny_config(**LINEAR, q_lora_rank=q_lora_rank)
    weights = random_weights(config, seed=1)
    model = kimi_linear(tmp_path, config, weights)
    chosen = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    for router in routers:
        router.register_forward_hook(lambda _, __, output: chosen.append(output[-1]))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    reference = Reference(config, weights)
    torch.testing.assert_close(reference.logits(TOKENS), want, atol=1e-4, rtol=1e-4)
    assert torch.equal(reference.routed(TOKENS).sort(-1).values, torch.stack(chosen).sort(-1).values)


def test_the_bounded_decay_is_transformers_glm_5_next():
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextForgetGate

    config = tiny_config()
    own = config["text_config"]["linear_attn_config"]
    weights, name = random_weights(config, seed=2), "model.layers.1.self_attn."
    bound = {"gate_lower_bound": own["gate_lower_bound"]}
    gate = Glm5NextTextForgetGate(Glm5NextTextConfig(hidden_size=64, linear_attn_config=bound, linear_num_heads=3, linear_head_dim=16))
    state = {part: weights[f"{PREFIX}{name}{part}"] for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias")}
    gate.load_state_dict(state | {"A_log": weights[f"{PREFIX}{name}A_log"][:3]})
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = gate(x[None])[0]
    got = Reference(config, weights).log_decay(x, name)
    torch.testing.assert_close(got, want)
    assert got.min() >= -5 and got.std() > 0.5


def test_residuals_mix_the_sums_of_whole_blocks_and_of_the_block_so_far():
    config = tiny_config()
    weights = random_weights(config, seed=4)
    reference, ids = Reference(config, weights), TOKENS[:20]
    w, text = reference.weights, config["text_config"]

    def normed(x, name):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], text["rms_norm_eps"])

    outputs = [(0, w["model.embed_tokens.weight"][ids])]  # (block, what a part added)

    def mixed(block, name):
        sums = [sum(out for at, out in outputs if at == part) for part in range(block + 1) if any(at == part for at, _ in outputs)]
        scores = torch.stack([normed(v, f"{name}_norm") @ w[f"{name}_proj.weight"][0] for v in sums])
        return sum(weight[:, None] * v for weight, v in zip(torch.softmax(scores, 0), sums, strict=True))

    for layer in range(7):
        name, block = f"model.layers.{layer}", 1 + layer // 3
        x = normed(mixed(block, f"{name}.self_attention_res"), f"{name}.input_layernorm")
        mixer = reference.mla if layer in (3, 5, 6) else reference.kda
        outputs.append((block, mixer(x, f"{name}.self_attn.")))
        x = normed(mixed(block, f"{name}.mlp_res"), f"{name}.post_attention_layernorm")
        if layer == 0:
            gate, up, down = (w[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            outputs.append((block, reference.act(x @ gate.T, x @ up.T) @ down.T))
        else:
            outputs.append((block, reference.moe(x, f"{name}.block_sparse_moe.")[0]))
    want = normed(mixed(3, "model.output_attn_res"), "model.norm") @ w["lm_head.weight"].T
    torch.testing.assert_close(reference.logits(ids), want, atol=1e-4, rtol=1e-4)


def test_situ_is_swiglu_near_zero_and_bounded_far_from_it():
    reference = Reference(tiny_config(), {})
    gate, up = torch.linspace(-0.02, 0.02, 9), torch.linspace(0.3, -0.3, 9)
    torch.testing.assert_close(reference.act(gate, up), torch.nn.functional.silu(gate) * up, atol=0, rtol=1e-3)
    assert reference.act(torch.tensor(1e4), torch.tensor(-1e4)) == -100


def test_an_open_gate_leaves_latent_attention_as_it_is_and_a_neutral_one_halves_it():
    config = tiny_config()
    weights, name = random_weights(config, seed=6), "model.layers.3.self_attn."
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(7))
    plain = Reference(tiny_config(mla_use_output_gate=False), weights).mla(x, name)
    halved = Reference(config, weights | {f"{PREFIX}{name}g_proj.weight": torch.zeros(48, 64)}).mla(x, name)
    torch.testing.assert_close(halved, plain / 2)
    assert not torch.allclose(Reference(config, weights).mla(x, name), plain, atol=0.1)


def test_later_tokens_change_no_earlier_logits():
    config = tiny_config()
    reference = Reference(config, random_weights(config, seed=8))
    whole = reference.logits(TOKENS)
    assert whole.shape == (75, 260) and whole.std() > 0.5
    for cut in (1, 2, 5, 64):
        torch.testing.assert_close(reference.logits(TOKENS[:cut]), whole[:cut], atol=1e-5, rtol=1e-5)
    assert reference.routed(TOKENS).shape == (6, 75, 3)


def test_a_written_checkpoint_holds_the_same_values_in_both_precisions(tmp_path):
    config = tiny_config()
    weights = random_weights(config, seed=9)
    for dtype in (torch.float32, torch.bfloat16):
        folder = write_checkpoint(tmp_path / str(dtype), config, weights, dtype)
        stored = load_file(folder / "model.safetensors")
        assert {name for name in stored if not name.startswith((PREFIX, "vision_tower.", "mm_projector."))} == set()
        for name, tensor in weights.items():
            assert stored[name].dtype == (torch.float32 if name.endswith(KEPT_IN_FLOAT32) else dtype)
            assert torch.equal(stored[name].float(), tensor)
        assert json.loads((folder / "config.json").read_text())["text_config"]["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5]


def test_names_and_shapes_at_the_released_size_are_the_releases():
    full = [*range(4, 93, 4), 93]
    config = tiny_config(
        vocab_size=163840, hidden_size=7168, intermediate_size=33792, num_hidden_layers=93, num_attention_heads=96, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=896, moe_intermediate_size=3072,
        routed_expert_hidden_size=3584, head_dim=128, num_heads=96, full_attn_layers=full, kda_layers=sorted({*range(1, 94)} - {*full}),
    )  # fmt: skip
    shapes = weight_shapes(config)
    assert sum(".experts." in name for name in shapes) == 92 * 896 * 3
    assert sum(".experts." not in name for name in shapes) == 2460
    released = {
        "lm_head.weight": (163840, 7168),
        "model.output_attn_res_norm.weight": (7168,),
        "model.output_attn_res_proj.weight": (1, 7168),
        "model.layers.0.mlp.down_proj.weight": (7168, 33792),
        "model.layers.0.self_attention_res_proj.weight": (1, 7168),
        "model.layers.90.self_attn.A_log": (128,),
        "model.layers.90.self_attn.b_proj.weight": (96, 7168),
        "model.layers.90.self_attn.dt_bias": (12288,),
        "model.layers.90.self_attn.f_a_proj.weight": (128, 7168),
        "model.layers.90.self_attn.f_b_proj.weight": (12288, 128),
        "model.layers.90.self_attn.k_conv1d.weight": (12288, 1, 4),
        "model.layers.90.self_attn.g_proj.weight": (12288, 7168),
        "model.layers.90.self_attn.o_norm.weight": (128,),
        "model.layers.91.self_attn.g_proj.weight": (12288, 7168),
        "model.layers.91.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.92.self_attn.kv_b_proj.weight": (24576, 512),
        "model.layers.92.self_attn.q_a_proj.weight": (1536, 7168),
        "model.layers.92.self_attn.q_b_proj.weight": (18432, 1536),
        "model.layers.92.block_sparse_moe.experts.895.w1.weight": (3072, 3584),
        "model.layers.92.block_sparse_moe.experts.895.w2.weight": (3584, 3072),
        "model.layers.92.block_sparse_moe.gate.e_score_correction_bias": (896,),
        "model.layers.92.block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
        "model.layers.92.block_sparse_moe.routed_expert_norm.weight": (3584,),
        "model.layers.92.block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
        "model.layers.92.block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
    }
    assert {PREFIX + name: shape for name, shape in released.items()}.items() <= shapes.items()
