"""Page bookkeeping. In: requests for pages, token ids of prefixes. Out: page numbers. Never touches a tensor.

A page is free, owned (reference count > 0) or cached (count 0, content still valid under a prefix key, evicted oldest first).
A full page's key chains over everything before it, so equal keys mean equal prefixes.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

PrefixKey = bytes


def prefix_keys(token_ids: Sequence[int], page_size: int, known: Sequence[PrefixKey] = ()) -> list[PrefixKey]:
    """Key of each full page of `token_ids`; key i covers tokens 0..(i + 1) * page_size - 1. `known`: the first of them."""
    keys = list(known)
    parent = keys[-1] if keys else b""
    data, size = array("q", token_ids[len(keys) * page_size :]).tobytes(), 8 * page_size
    for start in range(0, len(data) - size + 1, size):
        parent = hashlib.blake2b(parent + data[start : start + size], digest_size=16).digest()
        keys.append(parent)
    return keys


class PagePool:
    """Reference-counted pages with a prefix cache. All operations are O(pages touched)."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._page_of_key: dict[PrefixKey, int] = {}
        self._key_of_page: dict[int, PrefixKey] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def num_owned(self, pages: Iterable[int]) -> int:
        """How many of these pages have an owner."""
        return sum(self._counts[page] > 0 for page in pages)

    def num_exclusive(self, pages: Iterable[int]) -> int:
        """How many of these pages would become available if one owner released them all."""
        return sum(self._counts[page] == 1 for page in pages)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} pages asked for, {self.num_available} available"
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                del self._page_of_key[self._key_of_page.pop(page)]
            self._counts[page] = 1
            pages.append(page)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            if self._counts[page] == 0:
                del self._evictable[page]
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each page; a page without owners stays cached if it was published."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} released without an owner"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._key_of_page:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def publish(self, pages: Sequence[int], keys: Sequence[PrefixKey]) -> None:
        """Make full, computed pages findable by their prefix keys; the first page of a key wins."""
        for page, key in zip(pages, keys, strict=True):
            if key not in self._page_of_key and page not in self._key_of_page:
                self._page_of_key[key] = page
                self._key_of_page[page] = key

    def match(self, keys: Sequence[PrefixKey]) -> list[int]:
        """The longest run of cached pages for these keys; retain them before the next allocation."""
        pages = []
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def drop_cache(self) -> None:
        """Forget every published page (their KV came from other weights)."""
        self._page_of_key.clear()
        self._key_of_page.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check(self) -> None:
        """Assert the invariants; used by the tests after every step."""
        owned = sum(count > 0 for count in self._counts)
        assert owned + len(self._free) + len(self._evictable) == self.num_pages
        assert len(set(self._free)) == len(self._free)
        assert all(self._counts[page] == 0 for page in self._free)
        assert all(self._counts[page] == 0 and page in self._key_of_page for page in self._evictable)
        assert {p: k for k, p in self._page_of_key.items()} == self._key_of_page
