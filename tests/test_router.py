"""The router's promises, one at a time, without sockets or clocks."""

import pytest

from batchgen.outputs import Sample
from batchgen.request import sample_seed
from rollout.limits import ServiceLimits
from rollout.results import pack_sample
from rollout.router import Router
from rollout.router_types import (
    AbortedAll,
    AbortParts,
    Accepted,
    AssignParts,
    Cancelled,
    ClientJoined,
    ClientLost,
    Deliver,
    Hold,
    NewRequest,
    NodeDraining,
    NodeJoined,
    NodeLost,
    NodeResults,
    NodeServing,
    Order,
    ParamsRef,
    Refused,
    Repeated,
    Retired,
    Submitted,
    Tick,
)
from rollout.samples import expand, indices, lowest, ranges


def request(number: int, n: int = 1, timeout_s: float = 0.0, prompt: bytes = b"\1\0\0\0") -> NewRequest:
    return NewRequest(number, "ids", prompt, ParamsRef(b"p", n, "processed"), 7, timeout_s, False)


def results(order: Order, *, only: int | None = None, reason: str = "length"):
    """The node's results of an order, or of the samples in a mask."""
    from batchgen.events import SampleFinished

    found = []
    for index in indices(order.samples if only is None else only):
        seed = sample_seed(order.seed_base, index)
        sample = Sample(index=index, token_ids=[1], logprobs=[0.0], text="", finish_reason=reason, seed=seed, weights_versions=[(0, 0, 1)])
        found.append(pack_sample(order.part, SampleFinished(request_id="", sample=sample), "processed"))
    return found


def orders(actions, node=None) -> list[Order]:
    return [order for action in actions if isinstance(action, AssignParts) and node in (None, action.node) for order in action.orders]


def delivered(actions) -> list[tuple[int, int, str, str | None]]:
    """(request, index, reason, error code) of samples handed to clients."""
    items = [item for action in actions if isinstance(action, Deliver) for item, _ in action.items]
    return [(item.request, item.index, item.finish_reason, item.error.code if item.error else None) for item in items]


@pytest.fixture
def router() -> Router:
    one = Router(ServiceLimits(default_timeout_s=100, no_node_grace_s=10))
    one.handle(ClientJoined("c"), 0.0)
    return one


def joined(router: Router, *names: str, window: int = 64) -> None:
    for name in names:
        router.handle(NodeJoined(name, window, True), 0.0)


def test_a_request_is_accepted_assigned_and_delivered_once(router):
    joined(router, "a")
    actions = router.handle(Submitted("c", [request(0, n=3)]), 0.0)
    assert [action for action in actions if isinstance(action, Accepted)] == [Accepted("c", [0])]
    (order,) = orders(actions)
    assert delivered(router.handle(NodeResults("a", results(order)), 1.0)) == [(0, i, "length", None) for i in range(3)]
    assert delivered(router.handle(NodeResults("a", results(order)), 1.0)) == []
    assert (router.open_requests, router.open_bytes, router.outstanding("a")) == (0, 0, 0)


def test_requests_wait_for_the_first_node(router):
    assert not orders(router.handle(Submitted("c", [request(0)]), 0.0))
    assert len(orders(router.handle(NodeJoined("a", 8, True), 1.0))) == 1


def test_a_group_goes_to_one_node_as_a_whole_when_there_is_other_work(router):
    joined(router, "a", "b")
    found = orders(router.handle(Submitted("c", [request(k, n=16) for k in range(4)]), 0.0))
    assert [order.samples.bit_count() for order in found] == [16, 16, 16, 16]
    assert router.outstanding("a") == router.outstanding("b") == 32


def test_a_large_group_is_split_over_idle_nodes(router):
    joined(router, "a", "b")
    found = orders(router.handle(Submitted("c", [request(0, n=64)]), 0.0))
    assert sorted(order.samples.bit_count() for order in found) == [32, 32]
    assert sorted(index for order in found for index in indices(order.samples)) == list(range(64))


def test_a_group_larger_than_every_window_is_served_in_pieces(router):
    joined(router, "a", window=4)
    todo, done = orders(router.handle(Submitted("c", [request(0, n=10)]), 0.0)), []
    while todo:
        order = todo.pop()
        actions = router.handle(NodeResults("a", results(order)), 0.0)
        done += delivered(actions)
        todo += orders(actions)
    assert sorted(index for _, index, _, _ in done) == list(range(10))


def test_a_node_never_gets_more_than_its_window(router):
    joined(router, "a", window=5)
    router.handle(Submitted("c", [request(k) for k in range(50)]), 0.0)
    assert router.outstanding("a") == 5


def test_clients_take_turns_and_one_clients_requests_keep_their_order(router):
    router.handle(ClientJoined("d"), 0.0)
    router.handle(Submitted("c", [request(k, prompt=b"cccc") for k in range(4)]), 0.0)
    router.handle(Submitted("d", [request(k, prompt=b"dddd") for k in range(2)]), 0.0)
    found = orders(router.handle(NodeJoined("a", 100, True), 0.0))
    assert [order.prompt for order in found] == [b"cccc", b"dddd", b"cccc", b"dddd", b"cccc", b"cccc"]


def test_a_duplicate_of_an_open_request_is_accepted_and_generated_once(router):
    joined(router, "a")
    assert len(orders(router.handle(Submitted("c", [request(0)]), 0.0))) == 1
    actions = router.handle(Submitted("c", [request(0)]), 0.0)
    assert actions == [Accepted("c", [0])] and router.open_requests == 1


def test_a_duplicate_of_a_finished_request_asks_for_its_results_again(router):
    joined(router, "a")
    (order,) = orders(router.handle(Submitted("c", [request(0)]), 0.0))
    router.handle(NodeResults("a", results(order)), 0.0)
    assert router.handle(Submitted("c", [request(0)]), 0.0) == [Repeated("c", 0)]
    router.handle(Retired("c", 1), 0.0)
    (refused,) = router.handle(Submitted("c", [request(0)]), 0.0)
    assert isinstance(refused, Refused) and refused.error.code == "already_finished"


def test_a_lost_nodes_unfinished_samples_run_once_more_and_finished_ones_are_kept(router):
    joined(router, "a")
    (order,) = orders(router.handle(Submitted("c", [request(0, n=4)]), 0.0))
    assert len(delivered(router.handle(NodeResults("a", results(order, only=0b0101)), 0.0))) == 2
    router.handle(NodeJoined("b", 64, True), 0.0)
    (again,) = orders(router.handle(NodeLost("a", "killed"), 1.0), "b")
    assert (again.samples, again.seed_base) == (0b1010, order.seed_base)
    assert delivered(router.handle(NodeResults("a", results(order)), 1.0)) == []
    assert sorted(delivered(router.handle(NodeResults("b", results(again)), 2.0))) == [(0, 1, "length", None), (0, 3, "length", None)]
    assert router.counters["requeued_samples"] == 2 and router.counters["late_results"] == 4


def test_a_sample_whose_second_node_is_lost_too_is_an_error(router):
    joined(router, "a", "b")
    router.handle(Submitted("c", [request(0)]), 0.0)
    first, second = ("a", "b") if router.outstanding("a") else ("b", "a")
    router.handle(NodeLost(first, "killed"), 1.0)
    assert delivered(router.handle(NodeLost(second, "killed"), 2.0)) == [(0, 0, "error", "node_lost")]


def test_without_any_node_left_requests_end_after_the_grace_time(router):
    joined(router, "a")
    router.handle(Submitted("c", [request(0, n=2)]), 0.0)
    router.handle(NodeLost("a", "killed"), 1.0)
    assert delivered(router.handle(Tick(), 10.0)) == []
    assert delivered(router.handle(Tick(), 11.5)) == [(0, 0, "error", "no_nodes"), (0, 1, "error", "no_nodes")]


def test_nodes_that_are_all_set_aside_count_as_none(router):
    joined(router, "a")
    router.handle(NodeServing("a", False), 1.0)
    router.handle(Submitted("c", [request(0), request(1)]), 1.0)
    assert delivered(router.handle(Tick(), 11.5)) == [(0, 0, "error", "no_nodes"), (1, 0, "error", "no_nodes")]


def test_cancelling_ends_queued_samples_here_and_running_ones_at_their_node(router):
    joined(router, "a", window=8)
    actions = router.handle(Submitted("c", [request(0, n=8), request(1, n=2)]), 0.0)
    (order,) = orders(actions)
    actions = router.handle(Cancelled("c", [0, 1]), 1.0)
    assert delivered(actions) == [(1, 0, "abort", None), (1, 1, "abort", None)]
    assert [action for action in actions if isinstance(action, AbortParts)] == [AbortParts("a", [order.part])]
    assert len(delivered(router.handle(NodeResults("a", results(order, reason="abort")), 1.0))) == 8
    assert router.open_requests == 0


def test_a_cancelled_request_is_not_run_again_when_its_node_is_lost(router):
    joined(router, "a", "b")
    router.handle(Submitted("c", [request(0)]), 0.0)
    router.handle(Cancelled("c", [0]), 0.0)
    node = "a" if router.outstanding("a") else "b"
    actions = router.handle(NodeLost(node, "killed"), 0.0)
    assert delivered(actions) == [(0, 0, "abort", None)] and not orders(actions)


def test_a_deadline_gives_typed_errors_and_aborts_the_nodes_work(router):
    joined(router, "a")
    (order,) = orders(router.handle(Submitted("c", [request(0, n=2, timeout_s=5)]), 0.0))
    assert router.handle(Tick(), 4.9) == []
    actions = router.handle(Tick(), 5.5)
    assert delivered(actions) == [(0, 0, "error", "deadline"), (0, 1, "error", "deadline")]
    assert AbortParts("a", [order.part]) in actions
    assert delivered(router.handle(NodeResults("a", results(order)), 6.0)) == [] and router.outstanding("a") == 0


def test_a_lost_clients_work_is_aborted_and_its_memory_freed(router):
    joined(router, "a", window=1)
    (order,) = orders(router.handle(Submitted("c", [request(k) for k in range(10)]), 0.0))
    assert router.handle(ClientLost("c"), 1.0) == [AbortParts("a", [order.part])]
    assert (router.open_requests, router.open_bytes, router.queued_works, router.outstanding("a")) == (0, 0, 0, 0)


def test_abort_all_ends_every_clients_requests(router):
    router.handle(ClientJoined("d"), 0.0)
    router.handle(Submitted("c", [request(0)]), 0.0)
    router.handle(Submitted("d", [request(0, n=2)]), 0.0)
    assert len(delivered(router.handle(AbortedAll(), 1.0))) == 3 and router.open_requests == 0


def test_nothing_is_assigned_while_held_or_to_nodes_set_aside_or_draining(router):
    router.handle(Hold(True), 0.0)
    joined(router, "a")
    assert not orders(router.handle(Submitted("c", [request(0)]), 0.0))
    router.handle(NodeServing("a", False), 0.0)
    assert not orders(router.handle(Hold(False), 0.0))
    assert len(orders(router.handle(NodeServing("a", True), 0.0))) == 1
    router.handle(NodeDraining("a"), 0.0)
    assert not orders(router.handle(Submitted("c", [request(1)]), 0.0))


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"credits": 2}, "credits"),
        ({"max_queued_requests": 2}, "queue_full"),
        ({"max_queued_bytes": 10}, "queue_full"),
    ],
)
def test_requests_over_a_limit_are_rejected_with_advice_to_retry(limits, code):
    router = Router(ServiceLimits(**limits))
    router.handle(ClientJoined("c"), 0.0)
    assert router.handle(Submitted("c", [request(0), request(1)]), 0.0) == [Accepted("c", [0, 1])]
    (refused,) = router.handle(Submitted("c", [request(2)]), 0.0)
    assert isinstance(refused, Refused) and refused.error.code == code and refused.error.retryable and refused.retry_after_s > 0


def test_a_draining_service_takes_no_new_requests(router):
    router.draining = True
    (refused,) = router.handle(Submitted("c", [request(0)]), 0.0)
    assert refused.error.code == "draining"


def test_sample_sets_convert_to_ranges_and_back():
    for mask in (0, 1, 0b1011, (1 << 1024) - 1, int("10" * 512, 2)):
        assert expand(ranges(mask)) == list(indices(mask))
    assert lowest(0b110101, 2) == 0b101 and lowest(0b11, 5) == 0b11
