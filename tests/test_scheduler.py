"""The pure scheduler: what every plan must respect, whatever the state."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.scheduler import Limits, PrefillView, ReadyView, RunningView, SchedulerState, plan

PAGE = 4
counts = st.integers(0, 5)


def pages_for(tokens):
    return -(-tokens // PAGE)


@st.composite
def states(draw):
    ids = iter(range(1000))
    running = []
    for _ in range(draw(counts)):
        tokens = draw(st.integers(2, 40))
        running.append(
            RunningView(next(ids), tokens, pages_for(tokens - 1), draw(st.integers(0, pages_for(tokens - 1))), draw(st.integers(1, 30)))
        )
    prefilling = [
        PrefillView(
            next(ids),
            draw(st.integers(1, 50)),
            draw(st.sampled_from([3, 100])),
            0,
            draw(counts),
            draw(st.integers(1, 3)),
            draw(st.booleans()),
        )
        for _ in range(draw(counts))
    ]
    ready = [ReadyView(next(ids), draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(counts)) for _ in range(draw(counts))]
    waiting = []
    for is_resumption in [True] * draw(counts) + [False] * draw(counts):
        tokens = draw(st.integers(1, 60))
        waiting.append(
            PrefillView(next(ids), tokens, 100, pages_for(tokens), 0, 1 if is_resumption else draw(st.integers(1, 9)), is_resumption)
        )
    return SchedulerState(
        running=running,
        prefilling=prefilling,
        ready=ready,
        waiting=waiting,
        num_available_pages=draw(st.integers(0, 60)),
        num_available_places=draw(st.one_of(st.just(math.inf), st.integers(1, 9))),
        admitting=draw(st.booleans()),
    )


limits = st.builds(
    Limits,
    max_num_seqs=st.integers(5, 12),
    max_num_batched_tokens=st.integers(4, 64),
    page_size=st.just(PAGE),
    decision_interval=st.integers(1, 9),
)


@settings(deadline=None, max_examples=500)
@given(states(), limits)
def test_a_plan_never_promises_more_than_there_is(state, lim):
    p = plan(state, lim)
    running = {v.id: v for v in state.running if v.id not in p.yielded}
    ready = {v.id: v for v in state.ready}
    waiting = {v.id: v for v in state.waiting}
    prefilling = {v.id: v for v in state.prefilling}
    own = {v.id: v.num_own_pages for v in [*state.running, *state.prefilling, *state.ready]}
    available = state.num_available_pages + sum(own[i] for i in [*p.yielded, *p.dropped])

    growth = sum(max(0, pages_for(v.num_tokens - 1 + min(p.num_steps, v.remaining)) - v.num_pages) for v in running.values())
    started = sum(n * (pages_for(ready[i].num_tokens + p.num_steps) - ready[i].num_tokens // PAGE) for i, n in p.starts)
    admitted = sum(waiting[i].new_pages for i in p.admitted)
    assert growth + started + admitted <= available or (len(running) == 1 and not p.starts and not p.admitted)

    places = sum(n - (n == ready[i].num_unstarted) for i, n in p.starts) + len(p.admitted)
    assert places <= state.num_available_places

    live = len(running) + sum(n for _, n in p.starts)
    assert live <= max(lim.max_num_seqs, len(running))
    assert all(0 < n <= ready[i].num_unstarted for i, n in p.starts)
    assert sum(n for _, n in p.chunks) <= max(lim.max_num_batched_tokens - live, lim.page_size)
    for i, n in p.chunks:
        view = prefilling.get(i) or waiting[i]
        assert 0 < n <= min(view.num_left, view.max_chunk)
        assert i not in p.dropped and (i in prefilling or i in p.admitted)
    assert len({*p.yielded, *p.dropped, *p.admitted}) == len(p.yielded) + len(p.dropped) + len(p.admitted)
    if not state.admitting:
        assert not p.starts and all(waiting[i].is_resumption for i in p.admitted)
    if p.chunks:
        assert p.num_steps == 1


@settings(deadline=None, max_examples=300)
@given(states(), limits)
def test_waiting_work_is_admitted_in_order(state, lim):
    p = plan(state, lim)
    eligible = [v.id for v in state.waiting if v.is_resumption or state.admitting]
    assert p.admitted == eligible[: len(p.admitted)]


@settings(deadline=None, max_examples=300)
@given(states(), limits)
def test_something_always_moves_when_something_can(state, lim):
    p = plan(state, lim)
    if state.running or state.prefilling:
        assert p.num_steps > 0 or p.dropped
    elif state.ready and state.admitting:
        cost = pages_for(state.ready[0].num_tokens + lim.decision_interval) - state.ready[0].num_tokens // PAGE
        if state.num_available_pages >= cost:
            assert p.starts
        else:
            assert p.dropped or p.num_steps or len(state.ready) == 1


def test_the_youngest_sequence_yields_when_pages_run_out():
    running = [RunningView(i, 9, 2, 2, 10) for i in range(3)]
    lim = Limits(max_num_seqs=8, max_num_batched_tokens=64, page_size=4, decision_interval=4)
    p = plan(SchedulerState(running=running, prefilling=[], ready=[], waiting=[], num_available_pages=1), lim)
    assert p.yielded == [2]
    assert p.num_steps == 1
    p = plan(SchedulerState(running=running, prefilling=[], ready=[], waiting=[], num_available_pages=3), lim)
    assert (p.yielded, p.num_steps) == ([], 4)


def test_a_prefill_rides_along_with_decode_within_the_token_budget():
    running = [RunningView(i, 9, 3, 1, 10) for i in range(4)]
    waiting = [PrefillView(10 + i, 20, 64, 5, 0, 1, False) for i in range(3)]
    lim = Limits(max_num_seqs=8, max_num_batched_tokens=34, page_size=4, decision_interval=4)
    p = plan(SchedulerState(running=running, prefilling=[], ready=[], waiting=waiting, num_available_pages=60), lim)
    assert p.admitted == [10, 11]
    assert p.chunks == [(10, 20), (11, 10)]
    assert p.num_steps == 1


def test_a_prompt_starts_though_a_whole_interval_would_not_fit():
    lim = Limits(max_num_seqs=8, max_num_batched_tokens=32, page_size=PAGE, decision_interval=10**9)
    state = SchedulerState(running=[], prefilling=[], ready=[ReadyView(0, 7, 3, 2)], waiting=[], num_available_pages=2)
    out = plan(state, lim)
    assert (out.starts, out.num_steps) == ([(0, 2)], 1)
