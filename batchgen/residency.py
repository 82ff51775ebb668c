"""What prompts and sequences hold on the device: KV pages and a state. In: jobs. Out: pages and places, taken and given back.
Never decides who runs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from batchgen.kv_cache import KVCache
from batchgen.kv_pages import PagePool, prefix_keys
from batchgen.sequence import NO_PLACE, Prefill, Prompt, Sequence, State


class Places:
    """Numbers of states that nobody holds. Of a model without states: none, and none are needed."""

    def __init__(self, count: int):
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_available(self) -> float:
        """Infinite where none are needed."""
        return len(self._free) if self._count else math.inf

    @property
    def num_used(self) -> int:
        return self._count - len(self._free)

    def take(self) -> int:
        """The caller has checked `num_available`."""
        return self._free.pop() if self._count else NO_PLACE

    def give_back(self, place: int) -> None:
        """Harmless for NO_PLACE."""
        if place != NO_PLACE:
            self._free.append(place)

    def check(self) -> None:
        """Assert that nothing was given back twice."""
        assert len(set(self._free)) == len(self._free) <= self._count


@dataclass(slots=True, kw_only=True)
class Share:
    """What a sample holds when it starts."""

    pages: list[int]
    place: int


class Residency:
    """Pages and places of one device, and the cache they number."""

    def __init__(self, kv: KVCache):
        self.kv = kv
        self.pool = PagePool(kv.num_pages, kv.page_size)
        self.places = Places(kv.num_states)

    def cached_pages(self, job: Prefill) -> list[int]:
        """Pages of the prefix cache that this prefill can use. A prompt computes at least its last token itself; a model with states
        computes all, since what a prefix left in a state is not kept."""
        if self.kv.num_states:
            return []
        if isinstance(job, Prompt):
            if job.scored_by is not None or job.want_routed:
                return []
            return self.pool.match(job.keys[: (len(job.token_ids) - 1) // self.pool.page_size])
        return self.pool.match(job.keys)

    def num_new_pages(self, job: Prefill, cached: list[int]) -> int:
        """Pages that its admission would take from those available."""
        return self.pool.pages_for(len(job.token_ids)) - self.pool.num_owned(cached)

    def admit(self, job: Prefill) -> bool:
        """Give a waiting prefill its pages and place, and count what the prefix cache has; False, and nothing, if too few are left."""
        cached = self.cached_pages(job)
        self.pool.retain(cached)
        lacking = self.pool.pages_for(len(job.token_ids)) - len(cached)
        if lacking > self.pool.num_available or not self.places.num_available:
            self.pool.release(cached)
            return False
        job.pages, job.place = cached + self.pool.allocate(lacking), self.places.take()
        job.num_computed = job.num_cached = len(cached) * self.pool.page_size
        job.state = State.PREFILL
        return True

    def share(self, starts: Iterable[tuple[Prompt, int]]) -> list[Share]:
        """For the next samples, so many of each computed prompt, in order: full pages are shared; the last, partly filled one and the
        state are copied, but for the prompt's last sample, which takes them over."""
        shares: list[Share] = []
        pages: list[tuple[int, int]] = []
        places: list[tuple[int, int]] = []
        for prompt, number in starts:
            full = len(prompt.token_ids) // self.pool.page_size
            shared, partial = prompt.pages[:full], prompt.pages[full:]
            num_copies = number - (number == len(prompt.unstarted))
            for _ in range(num_copies):
                own, place = self.pool.allocate(len(partial)), self.places.take()
                pages += zip(partial, own, strict=True)
                places.append((prompt.place, place))
                shares.append(Share(pages=shared + own, place=place))
                self.pool.retain(shared)
            if num_copies < number:
                shares.append(Share(pages=prompt.pages, place=prompt.place))
        if pages:
            self.kv.copy_pages(*zip(*pages, strict=True))
        if places and self.kv.num_states:
            self.kv.copy_states(*zip(*places, strict=True))
        return shares

    def publish(self, seq: Sequence) -> None:
        """Leave a sequence's full pages in the prefix cache before they are released."""
        ids = (seq.request.prompt_token_ids + seq.output_ids)[: seq.num_computed]
        keys = prefix_keys(ids, self.pool.page_size, seq.prompt_keys[: len(ids) // self.pool.page_size])
        self.pool.publish(seq.pages[: len(keys)], keys)

    def release(self, holder: Prefill | Sequence) -> None:
        """Take everything back; its contents count no more, but for published pages."""
        self.pool.release(holder.pages)
        self.places.give_back(holder.place)
        holder.pages, holder.place = [], NO_PLACE

    def check(self) -> None:
        """Assert the invariants; used by the tests after every step."""
        self.pool.check()
        self.places.check()
