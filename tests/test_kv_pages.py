"""Page pool: invariants under random walks, prefix keys, eviction order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kv_pages import PagePool, prefix_keys


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(1, 4)), max_size=60))
def test_no_page_is_lost_or_owned_twice_under_random_walks(num_pages, actions):
    pool = PagePool(num_pages, 4)
    owners: list[list[int]] = []
    for kind, who, count in actions:
        if kind <= 1 and count <= pool.num_available:
            pages = pool.allocate(count)
            assert len(set(pages)) == count
            assert not set(pages) & {p for owned in owners for p in owned}
            owners.append(pages)
        elif kind == 2 and owners:
            shared = owners[who % len(owners)]
            pool.retain(shared)
            owners.append(list(shared))
        elif kind == 3 and owners:
            pool.release(owners.pop(who % len(owners)))
        elif kind == 4 and owners:
            pages = owners[who % len(owners)]
            pool.publish(pages, [bytes([who, i]) for i in range(len(pages))])
        elif kind == 5:
            cached = pool.match([bytes([who, i]) for i in range(count)])
            pool.retain(cached)
            owners.append(cached)
        pool.check()
        assert pool.num_used == len({p for owned in owners for p in owned})
    for pages in owners:
        pool.release(pages)
    pool.drop_cache()
    pool.check()
    assert pool.num_available == num_pages


def test_prefix_keys_cover_full_pages_and_chain():
    ids = list(range(20))
    keys = prefix_keys(ids, 8)
    assert len(keys) == 2
    assert prefix_keys([*ids[:8], 99, *ids[9:]], 8)[0] == keys[0]
    assert prefix_keys([*ids[:8], 99, *ids[9:]], 8)[1] != keys[1]
    assert prefix_keys([99, *ids[1:]], 8)[1] != keys[1]
    assert prefix_keys(ids[:7], 8) == []


def test_oldest_unowned_page_is_evicted_first_and_owned_pages_never():
    pool = PagePool(3, 4)
    a, b, c = pool.allocate(3)
    pool.publish([a, b, c], [b"a", b"b", b"c"])
    pool.release([b])
    pool.release([a])
    assert pool.allocate(1) == [b]
    assert pool.match([b"b"]) == []
    assert pool.match([b"a"]) == [a]
    pool.retain([a])
    with pytest.raises(AssertionError, match="1 pages asked for, 0 available"):
        pool.allocate(1)
    assert pool.match([b"c"]) == [c]


def test_drop_cache_forgets_pages_that_still_have_owners():
    pool = PagePool(2, 4)
    pages = pool.allocate(1)
    pool.publish(pages, [b"k"])
    pool.drop_cache()
    assert pool.match([b"k"]) == []
    pool.release(pages)
    pool.check()
    assert pool.num_available == 2
