"""What config.json says about quantisation is read as its authors mean it; what is not read here is refused with its file and field."""

import copy

import pytest

from batchgen.errors import ModelError
from batchgen.quant.fp8 import Fp8
from batchgen.quant.int4 import Int4
from batchgen.quant.mxfp4 import Mxfp4Blocks, Mxfp4Packed
from batchgen.quant.read import read_quantization

PATH = "model/config.json"
DEEPSEEK_V3 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
MINIMAX_M2 = DEEPSEEK_V3 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
GPT_OSS = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}
KIMI_K2 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def changed(values: dict, **changes) -> dict:
    """A copy; `a__b=1` sets values["a"]["b"], and `...` removes."""
    values = copy.deepcopy(values)
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder = values
        for parent in parents:
            holder = holder[parent]
        if value is ...:
            del holder[last]
        else:
            holder[last] = value
    return values


KIMI_K3 = changed(
    KIMI_K2,
    format="mxfp4-pack-quantized",
    config_groups__group_0__weights__type="float",
    config_groups__group_0__weights__scale_dtype="torch.uint8",
)


def read(values, stored=None):
    quantization = read_quantization({"quantization_config": values}, PATH, stored)
    assert quantization is not None
    return quantization


def test_a_plain_checkpoint_has_none():
    assert read_quantization({"text_config": {"hidden_size": 8}, "quantization_config": None}, PATH) is None


def test_fp8_applies_to_all_but_the_head_and_what_is_listed():
    quantization = read(DEEPSEEK_V3)
    assert quantization.format_of("model.layers.3.mlp.experts.7.up_proj.weight") == Fp8(block=(128, 128))
    assert quantization.format_of("lm_head.weight") is None
    quantization = read(MINIMAX_M2)
    assert quantization.format_of("model.layers.0.block_sparse_moe.gate.weight") is None
    assert quantization.format_of("model.layers.0.block_sparse_moe.experts.3.w1.weight") == Fp8()
    assert read(changed(DEEPSEEK_V3, weight_block_size=[64, 32])).format_of("a.weight") == Fp8(block=(64, 32))
    assert read(changed(DEEPSEEK_V3, scale_fmt="ue8m0")).format_of("a.weight") == Fp8(powers_of_two=True)


def test_listed_modules_match_as_in_transformers():
    listed = ["model.layers.1", "layers.*.mlp.gate", "model.layers.*.kv_b_proj", "o_proj"]
    quantization = read(changed(DEEPSEEK_V3, modules_to_not_convert=listed))
    cases = [
        ("model.layers.1.mlp.up_proj", True),
        ("model.layers.11.mlp.up_proj", False),
        ("model.layers.3.self_attn.kv_b_proj", True),
        ("model.layers.3.self_attn.kv_b_projection", False),
        ("model.layers.3.self_attn.o_proj", True),
        ("model.layers.3.mlp.gate_proj", False),
    ]
    should_convert = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    for module, excluded in cases:
        assert (quantization.format_of(f"{module}.weight") is None) is excluded, module
        assert should_convert(module, [*listed, "lm_head"]) is not excluded


def test_gpt_oss_has_its_experts_in_mxfp4_and_nothing_else():
    quantization = read(GPT_OSS)
    assert quantization.format_of("model.layers.3.mlp.experts.gate_up_proj") == Mxfp4Blocks()
    assert quantization.format_of("model.layers.3.mlp.experts.down_proj") == Mxfp4Blocks()
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.mlp.router.weight", "lm_head.weight"):
        assert quantization.format_of(name) is None


@pytest.mark.parametrize(("values", "form"), [(KIMI_K2, Int4()), (KIMI_K3, Mxfp4Packed())], ids=["int4", "mxfp4"])
def test_kimi_has_its_routed_experts_in_four_bits(values, form):
    quantization = read_quantization({"text_config": {"quantization_config": values}}, PATH)
    assert quantization is not None
    prefix = "language_model.model.layers.3"
    assert quantization.format_of(f"{prefix}.mlp.experts.7.up_proj.weight") == form
    for name in ("self_attn.q_a_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj"):
        assert quantization.format_of(f"{prefix}.{name}.weight") is None
    assert quantization.format_of("lm_head.weight") is None


def test_a_matrix_gets_the_format_of_the_first_group_that_targets_it():
    groups = {
        "experts": changed(KIMI_K2["config_groups"]["group_0"], targets=["re:.*experts.*"], weights__group_size=64),
        "rest": changed(KIMI_K3["config_groups"]["group_0"], targets=["a.q_proj"], format="mxfp4-pack-quantized"),
    }
    quantization = read(changed(KIMI_K2, config_groups=groups, ignore=[]))
    assert quantization.format_of("a.experts.1.w1.weight") == Int4(group=64)
    assert quantization.format_of("a.q_proj.weight") == Mxfp4Packed()
    assert quantization.format_of("a.k_proj.weight") is None


def test_stored_names_decide_what_the_configuration_leaves_open():
    stored = {"a.up.weight", "a.up.weight_scale_inv", "a.gate.weight"}
    quantization = read(DEEPSEEK_V3, stored)
    assert quantization.format_of("a.up.weight") == Fp8()
    assert quantization.format_of("a.gate.weight") is None
    with pytest.raises(ModelError, match=r"model/config\.json: quantization_config leaves a\.up out, but .* has a\.up\.weight_scale_inv"):
        read(changed(DEEPSEEK_V3, ignored_layers=["a.up"]), stored).format_of("a.up.weight")
    with pytest.raises(ModelError, match=r"a\.up\.weight_packed is in the checkpoint, a\.up\.weight_scale is not"):
        read(KIMI_K2, {"a.up.weight_packed"}).format_of("a.up.weight")


def test_dynamic_activations_stay_wide_and_static_ones_are_refused():
    dynamic = {"dynamic": True, "num_bits": 8, "type": "float"}
    assert read(changed(KIMI_K3, config_groups__group_0__input_activations=dynamic)).format_of("a.weight") == Mxfp4Packed()
    static = changed(KIMI_K3, config_groups__group_0__input_activations=dynamic | {"dynamic": False})
    with pytest.raises(ModelError, match=r"config_groups\.group_0\.input_activations\.dynamic is False"):
        read(static)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ("fp8", "quantization_config is an object"),
        ({}, "quant_method is missing"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'; read: 'fp8', 'mxfp4', 'compressed-tensors'"),
        ({"quant_method": ["fp8"]}, "quant_method is"),
        (changed(DEEPSEEK_V3, weight_block_size=...), "weight_block_size is missing"),
        (changed(DEEPSEEK_V3, weight_block_size=[128]), "weight_block_size is two positive integers"),
        (changed(DEEPSEEK_V3, weight_block_size=[128, 0]), "weight_block_size is two positive integers"),
        (changed(DEEPSEEK_V3, fmt="e5m2"), "fmt is 'e5m2'"),
        (changed(DEEPSEEK_V3, activation_scheme="static"), "activation_scheme is 'static'"),
        (changed(DEEPSEEK_V3, scale_fmt="fp16"), "scale_fmt is 'fp16'"),
        (changed(DEEPSEEK_V3, expert_dtype="fp4"), "expert_dtype is 'fp4'"),
        (changed(DEEPSEEK_V3, modules_to_convert=["embed"]), "modules_to_convert is"),
        (changed(DEEPSEEK_V3, modules_to_not_convert="gate"), "modules_to_not_convert is a list of strings"),
        (changed(DEEPSEEK_V3, modules_to_not_convert=["a("]), "modules_to_not_convert has .* not a regular expression"),
        (changed(GPT_OSS, modules_to_not_convert=[1]), "modules_to_not_convert is a list of strings"),
        (changed(KIMI_K2, format="marlin"), r"config_groups\.group_0\.format is 'marlin'"),
        (changed(KIMI_K2, format=...), r"config_groups\.group_0\.format is None"),
        (changed(KIMI_K2, config_groups=...), "config_groups is missing"),
        (changed(KIMI_K2, config_groups={}), "config_groups is empty"),
        (changed(KIMI_K2, config_groups={"W4A16": ["Linear"]}), r"config_groups\.W4A16 is an object"),
        (changed(KIMI_K2, config_groups__group_0__weights=None), r"group_0\.weights is missing"),
        (changed(KIMI_K2, config_groups__group_0__weights__num_bits=8), r"group_0\.weights\.num_bits is 8"),
        (changed(KIMI_K2, config_groups__group_0__weights__num_bits=...), r"group_0\.weights\.num_bits is missing"),
        (changed(KIMI_K2, config_groups__group_0__weights__group_size=16), r"weights\.group_size is 16; read: 32, 64, 128"),
        (changed(KIMI_K2, config_groups__group_0__weights__group_size=-1), r"weights\.group_size is -1"),
        (changed(KIMI_K2, config_groups__group_0__weights__symmetric=False), r"weights\.symmetric is False"),
        (changed(KIMI_K2, config_groups__group_0__weights__strategy="channel"), r"weights\.strategy is 'channel'"),
        (changed(KIMI_K2, config_groups__group_0__weights__actorder="group"), r"weights\.actorder is 'group'"),
        (changed(KIMI_K2, config_groups__group_0__weights__type="float"), r"weights\.type is 'float'"),
        (changed(KIMI_K3, config_groups__group_0__weights__group_size=16), r"weights\.group_size is 16; read: 32"),
        (changed(KIMI_K3, config_groups__group_0__weights__scale_dtype="torch.float8_e4m3fn"), r"weights\.scale_dtype is"),
        (changed(KIMI_K2, config_groups__group_0__targets=["Attention"]), r"targets has the class 'Attention'"),
        (changed(KIMI_K2, config_groups__group_0__targets=[]), r"group_0\.targets is missing"),
        (changed(KIMI_K2, config_groups__group_0__output_activations={"num_bits": 8}), r"group_0\.output_activations is"),
        (changed(KIMI_K2, quantization_status="frozen"), "quantization_status is 'frozen'"),
        (changed(KIMI_K2, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is"),
        (changed(KIMI_K2, transform_config={"a": 1}), "transform_config is"),
        (changed(KIMI_K2, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format is"),
        (changed(KIMI_K2, ignore=["re:("]), "ignore has .* not a regular expression"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_scheme_that_is_not_read_is_refused_with_its_file_and_field(values, field):
    with pytest.raises(ModelError, match=r"^model/config\.json: quantization_config") as caught:
        read_quantization({"quantization_config": values}, PATH)
    assert caught.match(field)


def test_errors_of_a_text_config_name_it():
    with pytest.raises(ModelError, match=r"^model/config\.json: text_config\.quantization_config\.quant_method is 'gptq'"):
        read_quantization({"text_config": {"quantization_config": {"quant_method": "gptq"}}}, PATH)


def test_two_configurations_that_differ_are_refused():
    both = {"quantization_config": KIMI_K2, "text_config": {"quantization_config": KIMI_K3}}
    with pytest.raises(ModelError, match=r"text_config\.quantization_config differ"):
        read_quantization(both, PATH)
    assert read_quantization(both | {"text_config": {"quantization_config": KIMI_K2}}, PATH) is not None
