"""Pushed weights: checked one by one, staged aside, swapped all at once into storage that never moves."""

import pytest
import torch
from tiny_models import Runner, tiny_moe

from batchgen.errors import ModelError, WeightUpdateError
from batchgen.models.registry import LoadedModel, load_model

TOKENS = [3, 200, 17, 17, 90, 5]
GATE = "model.layers.0.mlp.experts.3.gate_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {name: tmp_path_factory.mktemp(name) for name in ("old", "new", "tied")}
    return {
        "old": tiny_moe(paths["old"], seed=0),
        "new": tiny_moe(paths["new"], seed=1),
        "tied": tiny_moe(paths["tied"], seed=2, tie_word_embeddings=True),
    }


def load(folder, dtype: str = "float32") -> LoadedModel:
    return load_model(str(folder), dtype, "cpu", deterministic=True)


def logits(loaded: LoadedModel) -> torch.Tensor:
    return Runner(loaded, 1).step({0: TOKENS})[0]


def checkpoint_tensors(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def trainer_tensors(folder) -> dict[str, torch.Tensor]:
    """What a trainer on transformers 5 has: stacked experts, parameters that require gradients."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def push(loaded: LoadedModel, tensors: dict[str, torch.Tensor], version: int) -> None:
    stage = loaded.store.open(version)
    for name, tensor in tensors.items():
        stage.put(name, tensor)
    stage.commit()


def snapshot(loaded: LoadedModel) -> list[torch.Tensor]:
    return [storage.clone() for storage in loaded.store.table.storages()]


def assert_unchanged(loaded: LoadedModel, before: list[torch.Tensor]) -> None:
    assert all(torch.equal(old, now) for old, now in zip(before, loaded.store.table.storages(), strict=True))


def test_specs_are_the_names_and_shapes_of_the_checkpoint(folders):
    specs = load(folders["old"]).store.specs
    assert {name: tuple(t.shape) for name, t in checkpoint_tensors(folders["old"]).items()} == {n: s.shape for n, s in specs.items()}
    assert {spec.dtype for spec in specs.values()} == {"float32"}
    assert load(folders["old"], "bfloat16").store.specs[GATE].dtype == "bfloat16"


@pytest.mark.parametrize("source", [checkpoint_tensors, trainer_tensors])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pushed_weights_equal_a_fresh_load_bit_for_bit(folders, source, dtype):
    loaded = load(folders["old"], dtype)
    push(loaded, source(folders["new"]), 1)
    assert loaded.store.version == 1
    assert torch.equal(logits(loaded), logits(load(folders["new"], dtype)))


def test_pushing_the_same_weights_twice_gives_identical_logits(folders):
    loaded = load(folders["old"])
    push(loaded, trainer_tensors(folders["new"]), 1)
    first = logits(loaded)
    push(loaded, trainer_tensors(folders["new"]), 2)
    push(loaded, checkpoint_tensors(folders["new"]), 7)
    assert torch.equal(logits(loaded), first)


def test_parameters_keep_their_storage(folders):
    loaded = load(folders["old"])
    before = [storage.data_ptr() for storage in loaded.store.table.storages()]
    head = loaded.model.head.weight_ND
    push(loaded, checkpoint_tensors(folders["new"]), 1)
    assert [storage.data_ptr() for storage in loaded.store.table.storages()] == before
    assert loaded.model.head.weight_ND is head
    assert not head.requires_grad


def broken(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


BAD = {
    "wrong shape": (lambda t: t[:-1], "shape"),
    "transposed": (lambda t: t.T, "shape"),
    "extra dimension": (lambda t: t[None], "shape"),
    "NaN": (lambda t: broken(t, float("nan")), "not finite"),
    "infinity": (lambda t: broken(t, float("-inf")), "not finite"),
    "overflow in the storage type": (lambda t: broken(t.double(), 1e300), "not finite"),
    "integers": (lambda t: t.to(torch.int32), "dtype"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_tensor_is_refused_by_name_and_may_be_sent_again(folders, kind):
    loaded = load(folders["old"])
    before = snapshot(loaded)
    tensors = checkpoint_tensors(folders["new"])
    spoil, reason = BAD[kind]
    stage = loaded.store.open(1)
    for name, tensor in tensors.items():
        if name == GATE:
            with pytest.raises(WeightUpdateError, match=f"(?s){GATE}.*{reason}"):
                stage.put(name, spoil(tensor))
        else:
            stage.put(name, tensor)
    assert stage.missing() == [GATE]
    with pytest.raises(WeightUpdateError, match=GATE):
        stage.commit()
    assert_unchanged(loaded, before)
    assert loaded.store.version == 0
    stage.put(GATE, tensors[GATE])
    stage.commit()
    assert torch.equal(logits(loaded), logits(load(folders["new"])))


@pytest.mark.parametrize("name", ["model.layers.99.input_layernorm.weight", "model.layers.0.mlp.experts.8.up_proj.weight", "wte", ""])
def test_an_unknown_name_is_refused(folders, name):
    stage = load(folders["old"]).store.open(1)
    with pytest.raises(WeightUpdateError, match="no parameter"):
        stage.put(name, torch.zeros(48))


def test_a_repeated_name_is_refused_also_through_its_stacked_form(folders):
    loaded = load(folders["old"])
    single, stacked = checkpoint_tensors(folders["new"]), trainer_tensors(folders["new"])
    stage = loaded.store.open(1)
    stage.put(GATE, single[GATE])
    for name, tensor in (
        (GATE, single[GATE]),
        ("model.layers.0.mlp.experts.gate_up_proj", stacked["model.layers.0.mlp.experts.gate_up_proj"]),
    ):
        with pytest.raises(WeightUpdateError, match="sent already"):
            stage.put(name, tensor)
    stage.put("model.layers.1.mlp.experts.down_proj", stacked["model.layers.1.mlp.experts.down_proj"])
    with pytest.raises(WeightUpdateError, match="sent already"):
        stage.put("model.layers.1.mlp.experts.5.down_proj.weight", single["model.layers.1.mlp.experts.5.down_proj.weight"])


def test_missing_names_are_counted_and_listed(folders):
    loaded = load(folders["old"])
    stage = loaded.store.open(1)
    assert stage.missing() == list(loaded.store.specs)
    with pytest.raises(WeightUpdateError, match=f"lacks {len(loaded.store.specs)} parameters: .* more"):
        stage.commit()


def test_a_discarded_stage_leaves_everything_as_it_was_and_the_next_update_works(folders):
    loaded = load(folders["old"])
    before, tensors = snapshot(loaded), checkpoint_tensors(folders["new"])
    stage = loaded.store.open(1)
    for name in list(tensors)[:20]:
        stage.put(name, tensors[name])
    stage.discard()
    stage.discard()
    assert_unchanged(loaded, before)
    for use in (lambda: stage.put("model.norm.weight", tensors["model.norm.weight"]), stage.commit):
        with pytest.raises(WeightUpdateError, match="closed"):
            use()
    push(loaded, tensors, 1)
    assert loaded.store.version == 1


def test_one_stage_at_a_time_and_versions_only_grow(folders):
    store = load(folders["old"]).store
    stage = store.open(5)
    with pytest.raises(WeightUpdateError, match="is open") as refused:
        store.open(6)
    assert refused.value.retryable
    stage.discard()
    loaded = load(folders["old"])
    push(loaded, checkpoint_tensors(folders["new"]), 5)
    for version in (5, 4, 0, -1):
        with pytest.raises(WeightUpdateError, match="not newer"):
            loaded.store.open(version)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_is_accepted_when_equal_and_refused_otherwise(folders, head_first):
    tensors = checkpoint_tensors(folders["tied"])
    embedding = tensors.pop("model.embed_tokens.weight")
    pairs = [("lm_head.weight", embedding.clone()), ("model.embed_tokens.weight", embedding)]
    if not head_first:
        pairs.reverse()
    loaded = load(folders["tied"])
    push(loaded, dict(pairs) | tensors, 1)
    assert torch.equal(logits(loaded), logits(load(folders["tied"])))
    stage = loaded.store.open(2)
    stage.put(*pairs[0])
    with pytest.raises(WeightUpdateError, match="tied"):
        stage.put(pairs[1][0], pairs[1][1] + 1)
    stage.put(*pairs[1])


def test_a_tied_head_alone_does_not_stand_for_the_embedding(folders):
    stage = load(folders["tied"]).store.open(1)
    stage.put("lm_head.weight", checkpoint_tensors(folders["tied"])["model.embed_tokens.weight"])
    assert "model.embed_tokens.weight" in stage.missing()
    assert "lm_head.weight" not in stage.missing()


def test_a_checkpoint_with_nan_is_refused_when_loaded(folders, tmp_path):
    from safetensors.torch import save_file

    tensors = checkpoint_tensors(folders["old"])
    save_file(tensors | {GATE: broken(tensors[GATE], float("nan"))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["old"] / "config.json").read_bytes())
    with pytest.raises(ModelError, match=f"{GATE}.*not finite"):
        load(tmp_path)
