"""The order of eviction: what may have something to free, the least recently used first.

Owns a heap and nothing it names. Ages only grow, and things go without notice: both are found out when it comes to
them, so that a use or a removal costs the order nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar


class Aged(Protocol):
    """Something that can give way. Numbers are never used twice."""

    number: int

    @property
    def age(self) -> tuple[int, int]:
        """Smaller gives way first."""
        ...


Thing = TypeVar("Thing", bound=Aged)


class EvictionOrder(Generic[Thing]):
    """things: all there are, by number. frees: whether one has something to free now; what has none is forgotten here
    until it is added again."""

    def __init__(self, things: Mapping[int, Thing], frees: Callable[[Thing], bool]) -> None:
        self._things, self._frees = things, frees
        self._heap: list[tuple[tuple[int, int], int]] = []
        self._queued: set[int] = set()

    def add(self, thing: Thing) -> None:
        """It may have something to free."""
        if thing.number not in self._queued:
            self._queued.add(thing.number)
            heapq.heappush(self._heap, (thing.age, thing.number))

    def first(self) -> Thing | None:
        """The least recently used that has something to free. It stays in the order."""
        while self._heap:
            age, number = self._heap[0]
            thing = self._things.get(number)
            if thing is not None and thing.age != age:
                heapq.heapreplace(self._heap, (thing.age, number))
            elif thing is not None and self._frees(thing):
                return thing
            else:
                heapq.heappop(self._heap)
                self._queued.discard(number)
        return None

    def __contains__(self, thing: Thing) -> bool:
        return thing.number in self._queued

    def clear(self) -> None:
        self._heap.clear()
        self._queued.clear()
