"""Checkpoint folders that are incomplete, damaged or of another kind end in a ModelError that says what to do."""

import json
import shutil

import pytest
import torch
from tiny_models import Runner, tiny_moe

from batchgen import LLM
from batchgen.errors import MemoryPlanError, ModelError
from batchgen.models.registry import Outline, load_model, outline_model


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return tiny_moe(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(folder, dtype: str = "float32"):
    return load_model(str(folder), dtype, "cpu", deterministic=False)


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


def edit_tensors(folder, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder) -> dict[str, str]:
    """Split the checkpoint in two with an index; returns the weight map."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def refuses(folder, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        load(folder)


def test_a_missing_folder_is_named(tmp_path):
    refuses(tmp_path / "nowhere", "nowhere.*does not exist")


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    refuses(folder, "no config.json")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    refuses(folder, "config.json")


def test_an_unknown_architecture_is_refused_and_the_known_ones_are_named(folder):
    edit_config(folder, architectures=["MambaForCausalLM"])
    refuses(folder, "MambaForCausalLM.*Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_attention_heads": 3},
        {"head_dim": 15},
        {"hidden_size": 0},
        {"num_experts_per_tok": 9},
        {"vocab_size": "absent"},
    ],
    ids=str,
)
def test_a_config_that_we_would_compute_wrongly_is_refused(folder, changes):
    edit_config(folder, **changes)
    refuses(folder, "config.json")


@pytest.mark.parametrize("keep", [0, 5, 8, 200, 5000, -1])
def test_a_safetensors_file_cut_short_is_refused(folder, keep):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    refuses(folder, r"model.safetensors.*cut short|damaged")


def test_a_damaged_safetensors_header_is_refused(folder):
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[20:40] = b"\xff" * 20
    (folder / "model.safetensors").write_bytes(data)
    refuses(folder, "damaged header")


def test_a_missing_weight_file_is_refused(folder):
    (folder / "model.safetensors").unlink()
    refuses(folder, "lacks weight files: model.safetensors")


def test_shards_load_like_one_file(folder):
    tokens = {0: [1, 2, 3]}
    whole = Runner(load(folder), 1).step(tokens)[0]
    shard(folder)
    assert torch.equal(Runner(load(folder), 1).step(tokens)[0], whole)


def test_a_missing_shard_is_named(folder):
    weight_map = shard(folder)
    gone = weight_map["model.norm.weight"]
    (folder / gone).unlink()
    refuses(folder, gone)


def test_an_index_that_points_outside_the_folder_is_refused(folder):
    weight_map = shard(folder) | {"model.norm.weight": "../model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refuses(folder, "outside the folder")


def test_a_tensor_in_two_shards_is_named(folder):
    from safetensors.torch import load_file, save_file

    weight_map = shard(folder)
    first = weight_map["lm_head.weight"]
    other = next(file for file in weight_map.values() if file != first)
    save_file(load_file(folder / other) | {"lm_head.weight": torch.zeros(260, 48)}, folder / other)
    refuses(folder, f"lm_head.weight is in both {first} and {other}")


def test_an_index_that_places_a_tensor_elsewhere_is_refused(folder):
    weight_map = shard(folder)
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": other}}))
    refuses(folder, f"places lm_head.weight in {other}, but {weight_map['lm_head.weight']} has it")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | {"model.extra": other}}))
    refuses(folder, f"places model.extra in {other}, but no shard has it")


def test_a_config_that_contradicts_the_tensors_is_refused_before_any_is_read(folder, monkeypatch):
    monkeypatch.setattr("batchgen.loader.WeightFill.put", lambda *_: pytest.fail("a tensor was read"))
    edit_config(folder, moe_intermediate_size=40)
    refuses(folder, r"experts.0.*has shape \[.*\], the model's is")


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 1 << 20},
        {"vocab_size": 1 << 24},
        {"num_attention_heads": 4096, "head_dim": 1 << 20},
        {"moe_intermediate_size": 1 << 20},
        {"num_local_experts": 4096},
        {"num_hidden_layers": 4096},
        {"hidden_size": 1 << 20, "vocab_size": 1 << 24, "num_attention_heads": 4096, "head_dim": 1 << 20, "moe_intermediate_size": 1 << 20},
    ],
    ids=str,
)
def test_sizes_that_the_tensors_do_not_have_take_no_memory(folder, monkeypatch, changes):
    monkeypatch.setattr(Outline, "load", lambda _: pytest.fail("memory was taken"))
    edit_config(folder, **changes)
    refuses(folder, r"config.json")


def test_a_budget_that_the_weights_exceed_is_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr(Outline, "load", lambda _: pytest.fail("memory was taken"))
    with pytest.raises(MemoryPlanError, match=r"device_memory_gb=0.000 is too small: weights take 0.001 GB"):
        LLM(folder, dtype="float32", device_memory_gb=1e-4)


def test_what_an_outline_counts_is_what_weights_take(folder):
    outline = outline_model(str(folder), "float32", "cpu", deterministic=False)
    assert outline.weights_bytes == sum(storage.nbytes for storage in outline.load().store.table.storages())


def test_missing_and_unexpected_tensors_are_both_listed(folder):
    def change(tensors):
        tensors["model.layers.0.self_attn.sinks"] = tensors.pop("model.layers.1.self_attn.q_norm.weight")

    edit_tensors(folder, change)
    refuses(folder, r"lacks 1 .*layers.1.self_attn.q_norm.*does not: model.layers.0.self_attn.sinks")


def test_a_wrong_shape_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))
    refuses(folder, r"model.norm.weight has shape \[47\], the model's is \[48\]")


def test_eos_ids_come_from_the_generation_config_first(folder):
    assert load(folder).config.eos_token_ids == (256,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    assert load(folder).config.eos_token_ids == (256, 7)
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=[9])
    assert load(folder).config.eos_token_ids == (9,)
    edit_config(folder, eos_token_id=None)
    assert load(folder).config.eos_token_ids == ()


@pytest.mark.parametrize("names", [{"rope_parameters": "absent", "rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}], ids=str)
def test_rope_theta_is_read_under_both_names(folder, names):
    edit_config(folder, **names)
    assert load(folder).config.layers[0].mixer.rope.theta == 500.0


def test_experts_are_counted_under_both_names(folder):
    edit_config(folder, num_local_experts="absent", num_experts=8)
    assert load(folder).config.num_experts == 8


def test_the_fingerprint_changes_with_the_config_and_the_tensors(folder):
    first = load(folder).fingerprint
    assert load(folder).fingerprint == first
    edit_config(folder, transformers_version="0")
    second = load(folder).fingerprint
    shard(folder)
    assert len({first, second, load(folder).fingerprint}) == 3


@pytest.mark.parametrize("named", ["float32", "bfloat16", "float16", "torch.bfloat16", "absent"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_checkpoints_type_on_a_gpu_and_float32_on_a_cpu(folder, named, stored):
    """gpt-oss's config.json names no type."""
    edit_config(folder, dtype=named)
    edit_tensors(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items() if tensor.dim() > 1}))
    own = getattr(torch, named.removeprefix("torch.")) if named != "absent" else stored
    assert outline_model(str(folder), "auto", "cuda", deterministic=False).dtype == (own if own == torch.bfloat16 else torch.float32)
    assert outline_model(str(folder), "auto", "cpu", deterministic=False).dtype == torch.float32
    assert outline_model(str(folder), "bfloat16", "cpu", deterministic=False).dtype == torch.bfloat16


@pytest.mark.parametrize("weight_map", [[], "x", 3, None, {}, {"a": 3}, {"a": None}, {"a": ["b"]}, {"a": ""}, {"a": "x" * 5000}], ids=repr)
def test_an_index_that_is_no_map_of_names_is_refused(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refuses(folder, "model.safetensors.index.json: weight_map")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"dtype": "F32"', '"dtype": ["F32"]'),
        ('"dtype": "F32", ', ""),
        ('"shape": [48]', '"shape": null'),
        ('"shape": [48]', '"shape": [-48]'),
        ('"shape": [48], ', ""),
        ('"data_offsets": [', '"data_offsets": [0, '),
        ('"data_offsets": [', '"data_offsets": ["a", '),
        ('"lm_head.weight"', '"model.norm.weight"'),
        ("{", '{"a":' * 30000),
    ],
    ids=repr,
)
def test_a_header_that_makes_no_sense_is_refused(folder, old, new):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length])).replace(old, new, 1).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    refuses(folder, "model.safetensors has a damaged header")


def test_a_config_that_is_nested_without_end_is_refused(folder):
    (folder / "config.json").write_text('{"a":' * 30000)
    refuses(folder, "config.json is not valid JSON")


def test_values_that_are_not_finite_are_refused_with_file_and_tensor(folder):
    weight_map = shard(folder)
    file = weight_map["model.norm.weight"]

    from safetensors.torch import load_file, save_file

    save_file(load_file(folder / file) | {"model.norm.weight": torch.full((48,), float("nan"))}, folder / file)
    refuses(folder, f"{file}: model.norm.weight has values that are not finite")
