"""Pushing through publisher, coordinator and receivers with fake targets: what arrives and what is refused."""

import fake_weight_sync
import pytest
import torch
from fake_weight_sync import SPECS, FakeChannel, World, assert_holds, assert_untouched, push, state
from safetensors.torch import save_file

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync import publisher
from weights_sync.events import PublisherSaid


@pytest.fixture(autouse=True)
def short_silence(monkeypatch):
    monkeypatch.setattr(publisher, "SILENCE_S", 0.2)


# ---- what arrives -------------------------------------------------------------------------------------------------------


def test_every_node_holds_the_pushed_values_bit_for_bit():
    world = World([SPECS, SPECS])
    report = push(world)
    assert_holds(world, state())
    assert report.num_tensors == len(SPECS) and {node.node for node in report.nodes} == {"n0", "n1"} and not report.lost


def test_nothing_is_staged_before_every_node_agreed_to_the_table():
    world = World([SPECS, SPECS])
    push(world)
    log = world.nodes["n0"].target.log
    assert log[0] == ("open", 1) and [kind for kind, _ in log[1:-2]] == ["put"] * len(SPECS)
    assert log[-2:] == [("policy", "finish"), ("commit", 1)]


def test_iterator_dict_module_and_folder_push_the_same(tmp_path):
    tensors = state()
    save_file(dict(list(tensors.items())[:4]), tmp_path / "model-1.safetensors")
    save_file(dict(list(tensors.items())[4:]), tmp_path / "model-2.safetensors")
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        home = module
        for part in name.split(".")[:-1]:
            if not hasattr(home, part):
                home.add_module(part, torch.nn.Module())
            home = getattr(home, part)
        if name.endswith("bias"):
            home.register_buffer(name.split(".")[-1], tensor)
        else:
            home.register_parameter(name.split(".")[-1], torch.nn.Parameter(tensor))
    world = World()
    for version, weights in enumerate([iter(tensors.items()), tensors, module, tmp_path, str(tmp_path)], start=1):
        push(world, weights, version)
        assert_holds(world, tensors, version)


def test_wider_trainer_tensors_are_converted_before_they_travel():
    wide = {name: tensor.double() for name, tensor in state().items()}
    world = World()
    report = push(world, wide)
    assert_holds(world, state())
    assert report.num_bytes == sum(tensor.numel() * tensor.element_size() for tensor in state().values())


def test_narrower_trainer_tensors_travel_as_they_are():
    narrow = {name: tensor.bfloat16() for name, tensor in state().items()}
    world = World()
    assert push(world, narrow).num_bytes == 2 * sum(tensor.numel() for tensor in narrow.values())
    assert_holds(world, {name: tensor.to(getattr(torch, SPECS[name].dtype)) for name, tensor in narrow.items()})


def test_non_contiguous_tensors_arrive_in_order():
    tensors = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in state().items()}
    assert not tensors["model.embed_tokens.weight"].is_contiguous()
    world = World()
    push(world, tensors)
    assert_holds(world, state())


@pytest.mark.parametrize("shift", [0, 64])
def test_neighbours_in_memory_travel_without_a_copy_and_outlive_their_owner(shift, monkeypatch):
    """Tensors side by side in one block of memory, or with a gap that no bucket has."""
    specs = {f"model.layers.{k}.w": fake_weight_sync.Spec((64, 33), "float32") for k in range(30)}
    values = state(3, specs)
    block, tensors, at = torch.full((30 * (64 * 33 * 4 + 64),), 0xFF, dtype=torch.uint8), {}, 0
    for name, value in values.items():
        size = value.nbytes
        tensors[name] = block[at : at + size].view(torch.float32).view(value.shape).copy_(value)
        at += size + shift
    frames, in_place = [], publisher._Packer._in_place
    monkeypatch.setattr(publisher._Packer, "_in_place", lambda *args: frames.append(in_place(*args)) or frames[-1])
    world = World([specs])
    push(world, tensors)
    assert_holds(world, values)
    assert len(frames) > 2 and all((frame is None) == bool(shift) for frame in frames)
    del tensors, block
    whole = b"".join(bytes(frame) for frame in frames if frame is not None)
    assert shift or whole == b"".join(value.numpy().tobytes() for value in values.values())


def test_stacked_experts_and_wrapper_prefixes_are_mapped():
    tensors = state()
    experts = "model.layers.0.mlp.experts"
    part = lambda e, name: tensors[f"{experts}.{e}.{name}.weight"]  # noqa: E731
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacked[f"{experts}.gate_up_proj"] = torch.stack([torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(2)])
    stacked[f"{experts}.down_proj"] = torch.stack([part(e, "down_proj") for e in range(2)])
    world = World()
    push(world, {f"module._orig_mod.{name}": tensor for name, tensor in stacked.items()})
    assert_holds(world, tensors)


def test_tied_head_is_accepted_under_both_names_if_equal():
    tensors = state()
    world = World()
    push(world, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert_holds(world, tensors)
    renamed = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}
    push(world, renamed, 2)
    assert_holds(world, tensors, 2)
    with pytest.raises(WeightUpdateError, match="tied in this model but differ"):
        push(world, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, 3)
    assert_holds(world, tensors, 2)


def test_same_weights_twice_leave_the_same_bits():
    world = World()
    push(world, state(), 1)
    push(world, state(), 2)
    assert_holds(world, state(), 2)


@pytest.mark.parametrize("policy", ["finish", "abort", "continue"])
def test_policy_reaches_the_engine(policy):
    world = World()
    push(world, policy=policy)
    assert ("policy", policy) in world.nodes["n0"].target.log


def test_window_is_respected(on_send):
    world, most = World(), 0

    def count(message, data):
        nonlocal most
        update = world.coordinator._update
        most = max(most, update.num_buckets - update.acked + 1) if isinstance(message, m.Bucket) else most
        return message, data

    on_send(count)
    push(world)
    assert 1 <= most <= fake_weight_sync.LIMITS.window


# ---- refused before anything travels ------------------------------------------------------------------------------------


def refused(world, weights, match, version=1, **options):
    with pytest.raises(WeightUpdateError, match=match):
        push(world, weights, version, **options)
    assert all(log[0] != "put" for node in world.nodes.values() for log in node.target.log)
    assert_untouched(world)


def without(name):
    return {key: tensor for key, tensor in state().items() if key != name}


def test_missing_unexpected_and_misshapen_tensors_are_all_named():
    weights = without("model.norm.weight") | {"extra.weight": torch.ones(2), "model.embed_tokens.weight": torch.ones(3, 4)}
    with pytest.raises(WeightUpdateError) as error:
        push(World(), weights)
    for text in ("model.norm.weight is missing", "extra.weight is not a tensor", "has shape [3, 4], the engine's", "[300, 128]"):
        assert text in str(error.value)


def test_a_buffer_that_named_parameters_leaves_out_is_missed():
    refused(
        World(), without("model.layers.0.mlp.gate.e_score_correction_bias"), "^1 fault: .*e_score_correction_bias is missing.*state_dict"
    )


def test_many_missing_tensors_are_counted_and_the_advice_is_given_once():
    with pytest.raises(WeightUpdateError, match=r"^[0-9]+ faults: ") as error:
        push(World(), {"model.norm.weight": state()["model.norm.weight"]})
    assert str(error.value).count("push state_dict()") == 1 and str(error.value).count("is missing") > 1


def test_a_tensor_given_twice_is_refused():
    refused(World(), [*state().items(), ("model.norm.weight", torch.ones(128))], "comes twice")
    refused(World(), state() | {"module.model.norm.weight": torch.ones(128)}, "are the same tensor")


def test_integer_sparse_meta_and_absent_data_are_refused():
    refused(World(), state() | {"model.norm.weight": torch.ones(128, dtype=torch.int8)}, "torch.int8")
    refused(World(), state() | {"model.norm.weight": torch.ones(128).to_sparse()}, "no dense data")
    refused(World(), state() | {"model.norm.weight": torch.ones(128, device="meta")}, "no dense data")
    refused(World(), state() | {"model.norm.weight": 3.0}, "is a float")
    refused(World(), {}, "nothing to push")


def test_folder_without_files_cut_short_or_with_duplicates_is_refused(tmp_path):
    refused(World(), tmp_path, "holds no")
    save_file(state(), tmp_path / "a.safetensors")
    save_file(state(), tmp_path / "b.safetensors")
    refused(World(), tmp_path, "another file")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-100])
    refused(World(), tmp_path, "b.safetensors cannot be read")


def test_version_must_grow():
    refused(World(), state(), "version 0 is not greater than 0", version=0)
    world = World()
    push(world, version=5)
    with pytest.raises(WeightUpdateError, match="version 5 is not greater than 5"):
        push(world, version=5)
    assert_untouched(world, version=5)


@pytest.mark.parametrize("options", [{"policy": "maybe"}, {"timeout_s": 0}, {"timeout_s": 1e9}])
def test_wrong_options_are_refused(options):
    refused(World(), state(), next(iter(options)), **options)


def test_one_node_of_another_shape_refuses_for_all():
    other = SPECS | {"model.norm.weight": fake_weight_sync.Spec((127,))}
    world = World([SPECS, other])
    with pytest.raises(WeightUpdateError, match=r"node n1: model.norm.weight has shape \[128\], the engine's is \[127\]"):
        push(world)
    assert [node.target.stage for node in world.nodes.values()] == [None, None] and world.version == 0


def test_second_push_during_an_update_is_refused_and_disturbs_nothing(on_send, on_wait):
    world = World()
    on_wait(lambda: (world.tell(PublisherSaid(*first)), world.advance(0.5)))
    first = []

    def interrupt(message, data):
        if isinstance(message, m.Bucket) and message.index == 1:
            FakeChannel.on_send = None
            first[:] = [world.coordinator._update.peer, m.Abort(update="f" * 16, reason="")]  # any word shows that it lives
            with pytest.raises(WeightUpdateError, match="update to version 1 is in progress") as error:
                push(world, version=2)
            assert error.value.retryable
        return message, data

    on_send(interrupt)
    push(world)
    assert_holds(world, state())
