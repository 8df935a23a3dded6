"""Ways to find what texts have in common: each is given texts one after another, and says where it has seen content.

Owns the arms, the oracle, and the count that holds the one against the other. All work on what stands behind the first
SINK positions. What an arm reports it reports with the ids that it holds, and each is compared with the text.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

import numpy as np

from benchmarks.bench import require
from benchmarks.content_cutters import EXPECTED, Ids, blocks, local_minimum, threshold, windows
from benchmarks.content_input import Text
from leyline_server.cache.chunks import SINK, ChunkRegistry
from leyline_server.cache.fingerprints import SHORTEST
from leyline_server.cache.slots import Holder, Slots, SlotTable, common

Found = tuple[int, Ids]
"""Where in the text, and the ids that the arm has for it."""
Cutter = Callable[[Text], list[int]]
NAMESPACE: Final = ("bench",)
OURS: Final = "leyline: fingerprints"
MARKED: Final = "threshold, shared parts marked"
MARKED_TOO: Final = "the same, and windows"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest exact prefix of a text: `length` ids of the earlier text `number`."""

    number: int
    length: int

    @property
    def start(self) -> int:
        """From here on content is looked for."""
        return max(self.length, SINK)


class Arm(Protocol):
    def find(self, text: Text, prefix: Prefix) -> Iterable[Found]: ...
    def add(self, text: Text, prefix: Prefix) -> None: ...


class Chunks:
    """Chunks looked up whole by their ids. extended: a hit goes on to both sides as far as the texts agree."""

    def __init__(self, cutter: Cutter, extended: bool = False) -> None:
        self._cutter, self._extended = cutter, extended
        self._known: dict[bytes, tuple[Ids, int]] = {}

    def find(self, text: Text, prefix: Prefix) -> Iterator[Found]:
        for start, end in self._chunks(text):
            known = self._known.get(text.ids[start:end].tobytes())
            if known is not None:
                there, at = known
                before, after = _around(text.ids, start, end, there, at) if self._extended else (0, 0)
                yield start - before, there[at - before : at + end - start + after]

    def add(self, text: Text, prefix: Prefix) -> None:
        for start, end in self._chunks(text):
            self._known.setdefault(text.ids[start:end].tobytes(), (text.ids, start))

    def _chunks(self, text: Text) -> Iterator[tuple[int, int]]:
        edges = tuple(max(0, edge - SINK) for edge in text.edges)
        cuts = self._cutter(Text(text.ids[SINK:], edges))
        return ((SINK + start, SINK + end) for start, end in pairwise(cuts))


class AnyOffset:
    """Fixed windows of 128 ids: kept one after another, looked up at every offset."""

    def __init__(self) -> None:
        self._known: dict[int, Ids] = {}

    def find(self, text: Text, prefix: Prefix) -> Iterator[Found]:
        hashes, upto = windows(text.ids, EXPECTED), 0
        known = np.fromiter(self._known, np.uint64, len(self._known))
        for at in np.flatnonzero(np.isin(hashes, known)).tolist():
            ids = self._known[int(hashes[at])]
            if at >= max(upto, SINK) and np.array_equal(ids, text.ids[at : at + EXPECTED]):
                upto = at + EXPECTED
                yield at, ids

    def add(self, text: Text, prefix: Prefix) -> None:
        for at, found in list(enumerate(windows(text.ids, EXPECTED).tolist()))[SINK::EXPECTED]:
            self._known.setdefault(found, text.ids[at : at + EXPECTED])


class Together:
    """What one of several finds."""

    def __init__(self, *arms: Arm) -> None:
        self._arms = arms

    def find(self, text: Text, prefix: Prefix) -> Iterator[Found]:
        for arm in self._arms:
            yield from arm.find(text, prefix)

    def add(self, text: Text, prefix: Prefix) -> None:
        for arm in self._arms:
            arm.add(text, prefix)


class Registry:
    """The server's chunk registry, driven as the engine drives it, but that every text's rows count as exact: those of
    an exact prefix are the earlier text's, the others are its own, and all are registered."""

    def __init__(self, num_slots: int) -> None:
        self.table = SlotTable(num_slots)
        self.chunks = ChunkRegistry(self.table, budget=num_slots)
        self._ids_of = np.zeros(num_slots, np.int32)
        self._texts: list[Slots] = []

    def find(self, text: Text, prefix: Prefix) -> Iterator[Found]:
        upto = 0
        for hit in self.chunks.match(NAMESPACE, text.ids[prefix.start : -1]):
            require(hit.start >= upto, "two hits overlap")
            upto = hit.start + len(hit.slots)
            yield prefix.start + hit.start, self._ids_of[hit.slots]

    def add(self, text: Text, prefix: Prefix) -> None:
        shared = self._texts[prefix.number][: prefix.length] if prefix.length else np.zeros(0, np.int32)
        self.table.retain(shared, Holder.SESSION)
        fresh = self.table.allocate(np.arange(prefix.length, len(text.ids), dtype=np.int32))
        self._ids_of[fresh] = text.ids[prefix.length :]
        self._texts.append(np.concatenate([shared, fresh]))
        self.chunks.register(NAMESPACE, text.ids, self._texts[-1], prefix.length, len(self._texts))


class Oracle:
    """Every match of SHORTEST ids and more with any earlier text, wherever."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def covered(self, ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[n]: which ids stand in such a match."""
        edges = np.zeros(len(ids) + 1, np.int32)
        hashes = windows(ids[SINK:], SHORTEST).tolist()
        at = SINK + np.flatnonzero(np.fromiter((one in self._known for one in hashes), np.bool_, len(hashes)))
        np.add.at(edges, at, 1)
        np.add.at(edges, at + SHORTEST, -1)
        return np.cumsum(edges)[:-1] > 0

    def add(self, ids: Ids) -> None:
        self._known.update(windows(ids[SINK:], SHORTEST).tolist())


def arms(num_slots: int) -> dict[str, Arm]:
    return {
        "blocks of 128": Chunks(lambda text: blocks(text.ids)),
        "windows of 128, any offset": AnyOffset(),
        "threshold": Chunks(lambda text: threshold(text.ids)),
        "threshold, and windows": Together(Chunks(lambda text: threshold(text.ids)), AnyOffset()),
        "local minimum": Chunks(lambda text: local_minimum(text.ids)),
        "local minimum, extended": Chunks(lambda text: local_minimum(text.ids), extended=True),
        OURS: Registry(num_slots),
        MARKED: Chunks(marked),
        MARKED_TOO: Together(Chunks(marked), AnyOffset()),
    }


def marked(text: Text) -> list[int]:
    """The paper's cuts where markers stand around shared parts, at their best: a cut at each edge, and none that hangs
    on what is beyond it. Marker ids themselves are left out."""
    edges = sorted({0, *text.edges, len(text.ids)})
    return [*(low + cut for low, high in pairwise(edges) for cut in threshold(text.ids[low:high])[:-1]), len(text.ids)]


@dataclass(slots=True)
class Tally:
    """Counts of ids over lists of texts, and seconds of each arm's `find` and `add`."""

    tokens: int = 0
    texts: int = 0
    prefix: int = 0
    oracle: int = 0
    edges: int = 0
    found: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    finding: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    adding: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def share(self, arm: str) -> float:
        """Of what the oracle finds, in percent."""
        return 100 * self.found[arm] / max(1, self.oracle)


def count(texts: Sequence[Text], tally: Tally, make: Callable[[int], dict[str, Arm]] = arms) -> None:
    """Adds what each arm finds of each text in those before it, above the exact prefix and below the last id, which has
    to be computed. Raises WrongResult where an arm holds other ids than the text has."""
    every, oracle = make(sum(len(text.ids) for text in texts)), Oracle()
    for number, text in enumerate(texts):
        lengths = [common(text.ids[:-1], earlier.ids) for earlier in texts[:number]]
        prefix = Prefix(int(np.argmax(lengths)), max(lengths)) if lengths else Prefix(0, 0)
        tally.tokens += len(text.ids)
        tally.texts += 1
        tally.edges += len(text.edges)
        tally.prefix += prefix.length
        tally.oracle += int(np.count_nonzero(oracle.covered(text.ids[:-1])[prefix.start :]))
        oracle.add(text.ids)
        for name, arm in every.items():
            begun = time.perf_counter()
            found = list(arm.find(text, prefix))
            tally.finding[name] += time.perf_counter() - begun
            covered = np.zeros(len(text.ids), np.bool_)
            for start, ids in found:
                same = np.array_equal(ids, text.ids[start : start + len(ids)])
                require(same, f"{name}: what it found at {start} of text {number} is other content")
                covered[start : start + len(ids)] = True
            tally.found[name] += int(np.count_nonzero(covered[prefix.start : -1]))
            begun = time.perf_counter()
            arm.add(text, prefix)
            tally.adding[name] += time.perf_counter() - begun


def _around(ids: Ids, start: int, end: int, there: Ids, at: int) -> tuple[int, int]:
    """How far two texts that agree on ids[start:end] agree to the left of it and to the right."""
    left = common(ids[SINK:start][::-1], there[SINK:at][::-1])
    return left, common(ids[end:], there[at + end - start :])
