"""Updates that meet a fault: dead publishers, dead nodes, lost buckets, deadlines; before the decision and after it."""

import pytest
from fake_weight_sync import SPECS, FakeChannel, FakeTarget, World, assert_holds, assert_untouched, push, state

from batchgen.errors import WeightUpdateError
from weights_sync import messages as m
from weights_sync import publisher


@pytest.fixture(autouse=True)
def short_silence(monkeypatch):
    monkeypatch.setattr(publisher, "SILENCE_S", 0.2)


# ---- faults on the way --------------------------------------------------------------------------------------------------


def broken(world, match, weights=None, **options):
    with pytest.raises(WeightUpdateError, match=match) as error:
        push(world, weights, **options)
    assert_untouched(world)
    return error.value


def test_nan_leaves_the_old_version_on_every_node():
    weights = state()
    weights["model.layers.0.mlp.experts.1.up_proj.weight"][3, 3] = float("nan")
    broken(World([SPECS, SPECS]), "up_proj.weight has values that are not finite", weights)


def test_node_that_fails_alone_stops_the_update_everywhere():
    world = World([SPECS, SPECS])
    world.nodes["n1"].target.refuse_name = "model.norm.weight"
    broken(world, "node n1: model.norm.weight")


def test_changed_bytes_are_found_by_the_digest(on_send):
    def flip(message, data):
        if isinstance(message, m.Bucket) and message.index == 2:
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        return message, data

    on_send(flip)
    broken(World(), "bucket 2 has digest")


@pytest.mark.parametrize("size", [-64, 64])
def test_bucket_of_the_wrong_size_is_refused(on_send, size):
    def resize(message, data):
        if isinstance(message, m.Bucket) and message.index == 3:
            data = data[:size] if size < 0 else data + bytes(size)
        return message, data

    on_send(resize)
    broken(World(), "bucket 3 of .* bytes is not what the table says")


def test_lost_bucket_is_noticed_and_never_committed(on_send):
    on_send(lambda message, data: None if isinstance(message, m.Bucket) and message.index == 1 else (message, data))
    broken(World(), "bucket 2 came where 1 was due")


def test_trainer_that_raises_midway_aborts_the_update(monkeypatch):
    world = World()
    monkeypatch.setattr(publisher._Packer, "_get", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA fell over")))
    with pytest.raises(RuntimeError, match="CUDA fell over"):
        push(world)
    monkeypatch.undo()
    assert_untouched(world)


def test_publisher_killed_midway_frees_staging_after_the_deadline_and_the_next_push_works(on_send):
    world = World([SPECS, SPECS])
    on_send(
        lambda message, data: None if isinstance(message, m.Abort) or (isinstance(message, m.Bucket) and message.index) else (message, data)
    )
    channel = world.open_admin_channel()
    with pytest.raises(WeightUpdateError, match="silent"):
        publisher._Push(channel, publisher.open_source(state()), 1, "finish", 60.0).run()
    assert world.coordinator.busy and world.nodes["n0"].target.stage is not None
    world.advance(world.limits.silence_s + 1)
    assert_untouched(world)


def half_a_push(world, monkeypatch):
    """A publisher that falls silent when the first bucket is due; its channel."""
    channel = world.open_admin_channel()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(publisher._Packer, "pack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(FakeChannel, "on_send", staticmethod(lambda message, data: None if isinstance(message, m.Abort) else (message, data)))
        publisher._Push(channel, publisher.open_source(state()), 1, "finish", 60.0).run()
    assert world.coordinator.busy
    return channel


def test_a_push_that_meets_the_update_of_a_dead_publisher_takes_over_at_once(monkeypatch):
    world = World([SPECS, SPECS])
    half_a_push(world, monkeypatch).kill()
    push(world, version=1)
    assert world.now == 0.0
    assert_holds(world, state())


def test_a_push_that_meets_a_silent_publisher_waits_and_takes_over_when_its_time_is_up(monkeypatch, on_wait):
    world = World([SPECS, SPECS])
    half_a_push(world, monkeypatch)
    on_wait(lambda: world.advance(0.5))
    push(world, version=1)
    assert world.now <= world.limits.silence_s + 1
    assert_holds(world, state())


def test_publisher_whose_connection_closes_midway_frees_staging_at_once(on_send):
    world = World()
    on_send(lambda message, data: None if isinstance(message, m.Abort | m.Commit) else (message, data))
    broken(world, "silent")


def test_hung_node_ends_the_update_within_its_deadline(on_wait):
    world = World([SPECS, SPECS])
    world.nodes["n1"].hung = True
    on_wait(lambda: world.advance(1))
    with pytest.raises(WeightUpdateError, match="node n1 was silent for 10 s"):
        push(world)
    world.nodes["n1"].hung = False
    world.nodes["n1"].work()
    assert_untouched(world)


def test_dead_service_is_a_typed_error_not_a_hang(on_send):
    on_send(lambda message, data: None)
    with pytest.raises(WeightUpdateError, match="the service was silent") as error:
        push(World())
    assert error.value.code == "service_lost" and error.value.retryable


def test_no_node_is_a_typed_error():
    with pytest.raises(WeightUpdateError, match="no node has joined") as error:
        push(World([]))
    assert error.value.retryable


def test_node_that_dies_while_staging_leaves_the_others_on_the_old_version(on_send):
    world = World([SPECS, SPECS])

    def kill(message, data):
        if isinstance(message, m.Bucket) and message.index == 2 and "n1" in world.nodes:
            world.kill_node("n1")
        return message, data

    on_send(kill)
    assert broken(world, "node n1 was lost: its process died").retryable


# ---- finish, and after the decision --------------------------------------------------------------------------------------


def test_finish_swaps_only_when_nothing_runs_and_then_dispatch_goes_on(on_wait):
    world = World(running=3)

    def wait():
        assert world.held and world.nodes["n0"].target.version == 0
        world.advance(25)
        assert world.nodes["n0"].target.version == 0
        world.finish_running()

    on_wait(wait)
    push(world)
    assert_holds(world, state())
    assert not world.held


def test_running_samples_that_outlast_the_deadline_keep_the_old_version(on_wait):
    world = World(running=3)
    on_wait(lambda: world.advance(5))
    with pytest.raises(WeightUpdateError, match="timeout_s=20 while waiting for running samples"):
        push(world, timeout_s=20.0)
    world.finish_running()
    assert_untouched(world)


def test_abort_and_continue_do_not_wait_for_running_samples():
    world = World(running=3)
    push(world, policy="abort")
    push(world, state(), 2, policy="continue")
    assert_holds(world, state(), 2)


def test_node_that_dies_after_the_decision_is_reported_lost_and_the_rest_serve_the_new_version(on_wait):
    world = World([SPECS, SPECS])
    world.nodes["n1"].auto = False
    on_wait(lambda: world.kill_node("n1"))
    report = push(world)
    assert report.lost == ("n1",) and [node.node for node in report.nodes] == ["n0"]
    assert_holds(world, state())


def test_node_that_does_not_swap_in_time_serves_nothing_until_the_next_update(on_wait):
    world = World([SPECS, SPECS])
    slow = world.nodes["n1"]
    slow.auto = False
    on_wait(lambda: world.advance(world.limits.commit_s + 1))
    assert push(world).lost == ("n1",)
    assert world.serving == {"n0": True, "n1": False} and world.version == 1
    slow.swap()
    assert world.serving["n1"]
    slow.auto = True
    push(world, state(3), 2)
    assert_holds(world, state(3), 2)


def test_only_node_failing_untouched_after_the_decision_serves_on():
    world = World()

    def refuse(stage, policy):
        raise WeightUpdateError("out of memory")

    world.nodes["n0"].receiver._commit = refuse
    with pytest.raises(WeightUpdateError, match="out of memory"):
        push(world)
    world.nodes["n0"].receiver._commit = world.nodes["n0"]._commit
    assert_untouched(world)


def test_node_that_joins_with_old_weights_serves_nothing_until_an_update_reaches_it():
    world = World()
    push(world)
    world.add_node(FakeTarget(), "late")
    assert world.serving == {"n0": True, "late": False}
    push(world, state(2), 2)
    assert_holds(world, state(2), 2)


def test_node_that_joins_during_an_update_is_not_mixed_in(on_send):
    world = World()

    def join(message, data):
        if isinstance(message, m.Commit) and "late" not in world.nodes:
            world.add_node(FakeTarget(), "late")
        return message, data

    on_send(join)
    push(world)
    assert world.serving == {"n0": True, "late": False}


def test_restarted_service_learns_the_version_from_its_nodes():
    world = World([])
    world.add_node(FakeTarget(version=4), "behind")
    world.add_node(FakeTarget(version=5), "current")
    assert world.version == 5 and world.serving == {"behind": False, "current": True}
