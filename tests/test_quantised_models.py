"""Quantised checkpoints: computed as an independent decoder reads them, packed in memory, updated by a trainer, refused when broken."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kimi_k3_reference
import pytest
import torch
from quantised_models import KINDS, Tensors, checkpoints, quantise, write
from safetensors.torch import load_file
from tiny_models import Runner, tiny_model
from transformers import AutoModelForCausalLM

from batchgen import LLM, SamplingParams
from batchgen.errors import ModelError, WeightUpdateError
from batchgen.models.registry import LoadedModel, load_model
from batchgen.quant.packed import Packed

PROMPTS = [[random.Random(i).randrange(256) for _ in range(n)] for i, n in enumerate((7, 1, 41, 18))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    return request.param, *checkpoints(request.param, tmp_path_factory.mktemp(request.param))


def load(folder: Path, deterministic: bool = False) -> LoadedModel:
    return load_model(str(folder), "float32", "cpu", deterministic)


def logits(loaded: LoadedModel) -> dict[int, torch.Tensor]:
    return Runner(loaded, len(PROMPTS)).step(dict(enumerate(PROMPTS)))


def make(folder: Path, **options) -> LLM:
    return LLM(str(folder), dtype="float32", kv_gb=0.01, max_model_len=96, **options)


def tokens(llm: LLM) -> list[list[int]]:
    return [group.samples[0].token_ids for group in llm.generate(PROMPTS, GREEDY)]


def test_logits_are_those_of_the_independently_decoded_weights(made, products):
    _, packed, plain, _ = made
    got, ours = logits(load(packed)), logits(load(plain))
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    for i, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(got[i], ours[i], atol=1e-4, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(got[i], theirs(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_tokens_are_those_of_the_decoded_weights(made, products, deterministic):
    _, packed, plain, source = made
    want = tokens(make(plain, deterministic=deterministic))
    assert tokens(make(packed, deterministic=deterministic)) == want
    assert tokens(make(source)) != want


def test_quantised_matrices_stay_packed_and_no_more_is_held_than_is_stored(made):
    name, packed, _, source = made
    loaded, stored, plain = load(packed), load_file(packed / "model.safetensors"), load_file(source / "model.safetensors")
    decoded = [key for key in plain if KINDS[name].names.search(key) and "kv_b_proj" in key]
    held = {slot.name for slot in loaded.store.table.slots.values() if isinstance(slot.view, Packed) and not slot.covers}
    assert held == {key for key in plain if KINDS[name].names.search(key)} - set(decoded)
    num_bytes = sum(storage.nbytes for storage in loaded.store.table.storages())
    assert num_bytes <= sum(tensor.nbytes for tensor in stored.values()) + sum(plain[key].nbytes for key in decoded)
    assert make(packed).engine.memory.weights_bytes == num_bytes


def test_a_trainers_weights_are_packed_into_the_same_storage(made, tmp_path):
    name, packed, _, _ = made
    _, _, new = checkpoints(name, tmp_path, seed=1)
    llm = make(packed)
    before = [storage.data_ptr() for storage in llm.engine.weights.table.storages()]
    old = tokens(llm)
    pushed = {key: tensor.bfloat16() for key, tensor in load_file(new / "model.safetensors").items()}
    kv_b = {key: tensor for key, tensor in pushed.items() if "kv_b_proj" in key}
    _, decoded = quantise(KINDS[name], {key: tensor.float() for key, tensor in pushed.items()})
    llm.update_weights(pushed.items(), version=1)
    assert [storage.data_ptr() for storage in llm.engine.weights.table.storages()] == before
    fresh = make(packed)
    fresh.update_weights((decoded | kv_b).items(), version=1)
    assert tokens(llm) == tokens(fresh) != old


def test_a_trainers_stacked_experts_are_the_same_update(made, tmp_path):
    name, packed, _, _ = made
    _, _, new = checkpoints(name, tmp_path, seed=1)
    one_by_one, stacked = make(packed), make(packed)
    one_by_one.update_weights(load_file(new / "model.safetensors").items(), version=1)
    stacked.update_weights(AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict().items(), version=1)
    for one, other in zip(*(llm.engine.weights.table.storages() for llm in (one_by_one, stacked)), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_an_update_that_fails_leaves_every_packed_weight_as_it_was(made):
    name, packed, _, source = made
    loaded, tensors = load(packed), load_file(source / "model.safetensors")
    before = [storage.clone().view(torch.uint8) for storage in loaded.store.table.storages()]
    quantised = next(key for key in tensors if KINDS[name].names.search(key))
    stage = loaded.store.open(1)
    for bad, match in (
        (torch.full_like(tensors[quantised], float("nan")), "not finite"),
        (tensors[quantised][:-1], "has shape"),
        (tensors[quantised].to_sparse(), "is torch.sparse_coo on cpu; send dense"),
        (tensors[quantised].to("meta"), "is torch.strided on meta; send dense"),
        (tensors[quantised].tolist(), "is of <class 'list'>; send dense torch tensors"),
        (tensors[quantised].to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn; send torch.float32"),
    ):
        with pytest.raises(WeightUpdateError, match=f"{quantised}.*{match}"):
            stage.put(quantised, bad)
    for key, tensor in tensors.items():
        stage.put(key, torch.zeros_like(tensor))
    with pytest.raises(WeightUpdateError, match=f"{quantised} was sent already"):
        stage.put(quantised, tensors[quantised])
    stage.discard()
    stage = loaded.store.open(1)
    stage.put(quantised, tensors[quantised])
    with pytest.raises(WeightUpdateError, match="lacks"):
        stage.commit()
    assert all(torch.equal(old, now.view(torch.uint8)) for old, now in zip(before, loaded.store.table.storages(), strict=True))


FP8_NAME = "model.layers.0.self_attn.o_proj.weight"
INT4_NAME = "model.layers.1.mlp.experts.3.up_proj.weight"
BLOCKS_NAME = "model.layers.0.mlp.experts.down_proj"


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: new(tensors[name])})


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("deepseek_fp8", drop(f"{FP8_NAME}_scale_inv"), rf"model.safetensors: {FP8_NAME} has dtype torch.float8_e4m3fn without scales"),
        ("deepseek_fp8", drop(FP8_NAME), f"lacks 1 parameters: {FP8_NAME}"),
        ("deepseek_fp8", change(f"{FP8_NAME}_scale_inv", lambda s: s[:1]), rf"model.safetensors: {FP8_NAME}_scale_inv has shape \[1, 1\]"),
        ("deepseek_fp8", change(f"{FP8_NAME}_scale_inv", torch.Tensor.double), f"{FP8_NAME}_scale_inv has dtype float64; read"),
        ("deepseek_fp8", change(FP8_NAME, torch.Tensor.float), f"{FP8_NAME} has dtype float32; read"),
        ("deepseek_fp8", change(FP8_NAME, lambda w: w.to(torch.float8_e5m2)), f"{FP8_NAME} has dtype float8_e5m2; read"),
        ("kimi_int4", drop(f"{INT4_NAME}_scale"), f"lacks 1 parameters: {INT4_NAME}_scale"),
        ("kimi_int4", drop(f"{INT4_NAME}_shape"), f"lacks 1 parameters: {INT4_NAME}_shape"),
        ("kimi_int4", drop(f"{INT4_NAME}_packed"), f"lacks 1 parameters: {INT4_NAME}_packed"),
        ("kimi_int4", change(f"{INT4_NAME}_packed", lambda w: w[:, :-1]), rf"{INT4_NAME}_packed has shape \[32, 7\], .* \[32, 8\]"),
        ("kimi_int4", change(f"{INT4_NAME}_packed", torch.Tensor.long), f"{INT4_NAME}_packed has dtype int64; read"),
        ("gpt_oss_mxfp4", drop(f"{BLOCKS_NAME}_scales"), f"config.json: quantization_config: {BLOCKS_NAME}_blocks is in .*_scales is not"),
        ("gpt_oss_mxfp4", drop(f"{BLOCKS_NAME}_blocks"), f"lacks 1 parameters: {BLOCKS_NAME}_blocks"),
        ("gpt_oss_mxfp4", change(f"{BLOCKS_NAME}_blocks", lambda w: w.flatten(2)), rf"{BLOCKS_NAME}_blocks has shape \[8, 64, 16\]"),
        ("qwen_mxfp4", lambda t: t.update({FP8_NAME: torch.zeros(64, 64)}), f"has 1 that the model does not: {FP8_NAME}"),
    ],
)
def test_parts_that_contradict_each_other_are_refused_before_any_is_read(tmp_path, monkeypatch, name, edit, match):
    packed, _, _ = checkpoints(name, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    edit(tensors)
    write(packed, tensors)
    monkeypatch.setattr("batchgen.loader.Checkpoint.tensors", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError, match=match):
        load(packed)


@pytest.mark.parametrize(
    ("name", "edit", "match"),
    [
        ("deepseek_fp8", change(f"{FP8_NAME}_scale_inv", lambda s: s * float("nan")), f"{FP8_NAME}: a block's scale is not finite"),
        ("deepseek_fp8", change(FP8_NAME, lambda w: w.view(torch.uint8).fill_(127).view(w.dtype)), f"{FP8_NAME}: a value is NaN"),
        ("kimi_int4", change(f"{INT4_NAME}_shape", lambda s: s.flip(0)), rf"{INT4_NAME}: weight_shape says \[64, 32\], .* \[32, 64\]"),
        ("kimi_int4", change(f"{INT4_NAME}_scale", lambda s: s * float("inf")), f"{INT4_NAME}: a group's scale is not finite"),
        ("kimi_int4", change(f"{INT4_NAME}_scale", lambda s: s.fill_(3e38)), f"{INT4_NAME}: a group's scale is not finite or not below"),
        ("gpt_oss_mxfp4", change(f"{BLOCKS_NAME}_scales", lambda s: s.fill_(255)), f"{BLOCKS_NAME}: a group's scale is NaN"),
    ],
)
def test_values_that_no_matrix_has_are_refused(tmp_path, name, edit, match):
    packed, _, _ = checkpoints(name, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    edit(tensors)
    write(packed, tensors)
    with pytest.raises(ModelError, match=f"{tmp_path}.*{match}.*the checkpoint is damaged"):
        load(packed)


@pytest.mark.parametrize(
    ("name", "config", "match"),
    [
        ("deepseek_fp8", {"quantization_config": {"quant_method": "awq"}}, "config.json: quantization_config.quant_method is 'awq'; read"),
        ("deepseek_fp8", {"quantization_config": None}, "has .* that the model does not: .*_scale_inv"),
        (
            "kimi_int4",
            {"moe_intermediate_size": 40},
            r"config.json: quantization_config asks for .*INT4 holds rows of a multiple of 32 .* 40",
        ),
        ("qwen_mxfp4", {"moe_intermediate_size": 96}, r"experts.\d.\w+_proj.weight_packed has shape \[\d+, \d+\], the model's is"),
        (
            "gpt_oss_mxfp4",
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [r"model.layers.\d+.mlp.experts.down_proj"]}},
            "leaves model.layers.0.mlp.experts.down_proj out, but the checkpoint has",
        ),
    ],
)
def test_a_configuration_that_contradicts_the_files_is_refused(tmp_path, name, config, match):
    packed, _, _ = checkpoints(name, tmp_path)
    values = json.loads((packed / "config.json").read_text()) | config
    (packed / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=match):
        load(packed)


def test_experts_of_a_layer_with_different_formats_are_refused(tmp_path):
    packed, plain, _ = checkpoints("qwen_mxfp4", tmp_path)
    tensors, decoded = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in decoded if "layers.1.mlp.experts" in name and "down_proj" in name]:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)} | {name: decoded[name]}
    write(packed, tensors)
    with pytest.raises(ModelError, match=r"experts of a layer have one format, got .*layers.1.mlp.experts.0.gate_proj"):
        load(packed)


def test_a_matrix_that_is_stored_plainly_may_stand_beside_packed_ones(tmp_path):
    packed, plain, _ = checkpoints("deepseek_fp8", tmp_path)
    tensors, decoded = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight", "model.layers.1.self_attn.q_a_proj.weight"]
    for name in names:
        del tensors[f"{name}_scale_inv"]
        tensors[name] = decoded[name]
    write(packed, tensors)
    for got, want in zip(logits(load(packed)).values(), logits(load(plain)).values(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_kimi_k25_under_the_hubs_names_with_its_quantisation_in_the_text_config(tmp_path):
    kind = replace(KINDS["kimi_int4"], family="kimi_k25")
    source = tiny_model("kimi_k25", tmp_path / "source", **kind.sizes)
    tensors = load_file(source / "model.safetensors")
    hub = {name.replace("model.blocks.", "model.layers.").removeprefix("model."): tensor for name, tensor in tensors.items()}
    stored, decoded = quantise(kind, hub)
    text = json.loads((source / "config.json").read_text())["text_config"]
    for folder, values, quantization in (("packed", stored, {"quantization_config": kind.config}), ("plain", decoded, {})):
        shutil.copytree(source, tmp_path / folder)
        write(tmp_path / folder, values, text_config=text | quantization)
    packed, plain = load(tmp_path / "packed"), load(tmp_path / "plain")
    assert {name for name in packed.store.table.parts if name.endswith("_packed")} == {
        f"{name}_packed" for name in hub if kind.names.search(name)
    }
    for got, want in zip(logits(packed).values(), logits(plain).values(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_kimi_k3_with_its_experts_in_mxfp4_computes_what_the_reference_does(tmp_path):
    config = kimi_k3_reference.tiny_config()
    kind = replace(KINDS["qwen_mxfp4"], names=re.compile(r"\.experts\.\d+\.w[123]\.weight$"))
    stored, decoded = quantise(kind, kimi_k3_reference.random_weights(config, 0))
    folder = kimi_k3_reference.write_checkpoint(tmp_path, config, decoded)
    vision = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name not in decoded}
    write(folder, stored | vision, quantization_config=kind.config)
    loaded, reference = load(folder), kimi_k3_reference.Reference(config, decoded, torch.float64)
    assert sum(name.endswith("_packed") for name in loaded.store.table.parts) == sum(map(bool, map(kind.names.search, decoded)))
    for i, got in logits(loaded).items():
        torch.testing.assert_close(got.double(), reference.logits(PROMPTS[i]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("written", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_what_is_not_quantised_keeps_its_type_on_a_cpu(tmp_path, written, dtype):
    packed, _, _ = checkpoints("qwen_mxfp4", tmp_path)
    write(packed, load_file(packed / "model.safetensors"), dtype=written)
    assert load_model(str(packed), "auto", "cpu", deterministic=False).dtype == dtype
