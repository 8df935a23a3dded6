"""The arms: four ways to keep a conversation short, over one engine. Each is a `Conversation` of token ids.

    append only   nobody edits: the ideal hit rate
    re-prefill    the client edits its own copy and sends all of it to a new sequence; the prefix tree helps
    eager splice  the paper's way: what stands behind an edit is rewritten, turned, into fresh slots; its old slots
                  stay taken until the session ends; R takes a forward pass of its own
    leyline       the list is edited; R is computed together with the next message

They ask the engine directly, without gRPC, on one thread: the front is the same for all. A turn is a generator that
yields what it waits for, so that many sessions take turns on one engine (`play`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

import leyline_kernels
from benchmarks import drive
from benchmarks.drive import Watch
from benchmarks.registry import NAMESPACE
from leyline_server.cache.pool import upload
from leyline_server.cache.slots import Slots
from leyline_server.engine.engine import RowEdit
from leyline_server.engine.local import LocalEngine
from leyline_server.model.rotary_probe import RotaryProbe

Script = Generator[Watch | float, None, None]
"""A session's course: yields a request to wait for, or the moment until which it sleeps."""


@dataclass(frozen=True, slots=True)
class Cut:
    """[start, end) of the list as it stands gives way to `ids`. Several of one turn are disjoint, ascending."""

    start: int
    end: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took. Seconds from having edits and messages at hand; tokens as the engine reports them."""

    prompt: int
    prefilled: int
    ttft: float
    wall: float


class Conversation(Protocol):
    """One session of an arm. `ids` is its list after the last turn."""

    ids: list[int]
    turns: list[Turn]

    def turn(self, cuts: Sequence[Cut], message: Sequence[int], max_tokens: int, force: Sequence[int] = ()) -> Script:
        """Cuts, appends, generates. Notes the turn when it is done."""
        ...

    def close(self) -> None: ...


def edited(ids: Sequence[int], cuts: Sequence[Cut]) -> list[int]:
    out, at = [], 0
    for cut in cuts:
        out += [*ids[at : cut.start], *cut.ids]
        at = cut.end
    return [*out, *ids[at:]]


def _noted(watch: Watch, begun: float, prefilled_before: int = 0) -> Turn:
    report = watch.report
    assert report is not None
    prompt = report.prefix_hit + report.kept + report.computed
    return Turn(prompt, report.computed + prefilled_before, watch.times[0] - begun, watch.ended_at - begun)


class AppendOnly:
    """Ignores every cut: the same messages, nothing edited."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self._sequence = engine, engine.open(NAMESPACE)
        self.ids: list[int] = []
        self.turns: list[Turn] = []

    def turn(self, cuts: Sequence[Cut], message: Sequence[int], max_tokens: int, force: Sequence[int] = ()) -> Script:
        begun = time.perf_counter()
        self._engine.append(self._sequence, message)
        watch = drive.generate(self._engine, self._sequence, max_tokens, force)
        yield watch
        self.ids += [*message, *watch.tokens]
        self.turns.append(_noted(watch, begun))

    def close(self) -> None:
        self._engine.close(self._sequence)


class InPlace:
    """Leyline: AMORTIZE on the live sequence."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self._sequence = engine, engine.open(NAMESPACE)
        self._edits = 0
        self.ids: list[int] = []
        self.turns: list[Turn] = []

    def turn(self, cuts: Sequence[Cut], message: Sequence[int], max_tokens: int, force: Sequence[int] = ()) -> Script:
        begun = time.perf_counter()
        if cuts:
            self._engine.splice(self._sequence, [self._row_edit(cut) for cut in cuts])
        self._engine.append(self._sequence, message)
        watch = drive.generate(self._engine, self._sequence, max_tokens, force)
        yield watch
        self.ids = [*edited(self.ids, cuts), *message, *watch.tokens]
        self.turns.append(_noted(watch, begun))

    def _row_edit(self, cut: Cut) -> RowEdit:
        self._edits += 1
        return RowEdit(cut.start, cut.end, cut.ids, f"e{self._edits}")

    def close(self) -> None:
        self._engine.close(self._sequence)


class Reprefilled:
    """A new sequence for every turn, given the whole edited list; the one before it is closed first."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._sequence: int | None = None
        self.ids: list[int] = []
        self.turns: list[Turn] = []

    def turn(self, cuts: Sequence[Cut], message: Sequence[int], max_tokens: int, force: Sequence[int] = ()) -> Script:
        begun = time.perf_counter()
        self.close()
        self.ids = [*edited(self.ids, cuts), *message]
        self._sequence = drive.open_with(self._engine, self.ids)
        watch = drive.generate(self._engine, self._sequence, max_tokens, force)
        yield watch
        self.ids += watch.tokens
        self.turns.append(_noted(watch, begun))

    def close(self) -> None:
        if self._sequence is not None:
            self._engine.close(self._sequence)
        self._sequence = None


class EagerSplice:
    """The paper's way, on this engine's pool. Its books are the engine's: what it rewrites it allocates there."""

    def __init__(self, engine: LocalEngine, rotary: RotaryProbe) -> None:
        self._engine, self._rotary = engine, rotary
        self._sequence = engine.open(NAMESPACE)
        self._taken: list[Slots] = []
        self._edits = 0
        self.ids: list[int] = []
        self.turns: list[Turn] = []

    def turn(self, cuts: Sequence[Cut], message: Sequence[int], max_tokens: int, force: Sequence[int] = ()) -> Script:
        begun, extra = time.perf_counter(), 0
        if cuts:
            self._splice(cuts)
        if any(cut.ids for cut in cuts):
            pass_for_r = drive.compute(self._engine, self._sequence)
            yield pass_for_r
            assert pass_for_r.report is not None
            extra = pass_for_r.report.computed
        self._engine.append(self._sequence, message)
        watch = drive.generate(self._engine, self._sequence, max_tokens, force)
        yield watch
        self.ids = [*edited(self.ids, cuts), *message, *watch.tokens]
        self.turns.append(_noted(watch, begun, extra))

    def _splice(self, cuts: Sequence[Cut]) -> None:
        cache, edits = self._engine.cache, []
        slots = self._engine.sequences[self._sequence].rows.slots
        for cut in cuts:
            self._edits += 1
            edits.append(RowEdit(cut.start, cut.end, cut.ids, f"e{self._edits}"))
            span = slots[cut.start : cut.end]
            cache.retain(span)  # nothing that goes is given back while the session lives
            self._taken.append(span)
        self._engine.splice(self._sequence, edits)
        self._rewrite()

    def _rewrite(self) -> None:
        """Every row that stands elsewhere than where it was written gets a fresh slot, its key turned to its place."""
        cache, state = self._engine.cache, self._engine.sequences[self._sequence]
        table, pool = cache.table, cache.pool
        index = np.flatnonzero(state.rows.turned(table))
        old = state.rows.slots[index]
        fresh = cache.allocate(index.astype(np.int32))
        delta = (index - table.written_at[old]).astype(np.int32)
        device = pool.c_kv.device
        source, target, moved = (upload(one, device) for one in (old, fresh, delta))
        pool.c_kv[:, target.long()] = pool.c_kv[:, source.long()]
        assert self._rotary.layout is not None, self._rotary.reason
        leyline_kernels.rotate(pool.k_pe, source, target, moved, self._rotary.inv_freq, self._rotary.layout)
        state.rows = state.rows.filled(index, fresh)
        self._taken.append(old)

    def close(self) -> None:
        self._engine.close(self._sequence)
        for slots in self._taken:
            self._engine.cache.release(slots)
        self._taken.clear()


@dataclass(slots=True)
class Played:
    """What `play` saw of the engine. `peak_slots`: the most that sessions held, looked at after every turn.

    busy_s: inside steps that did something, by the host's clock; what the device was busy is less.
    """

    wall_s: float = 0.0
    busy_s: float = 0.0
    peak_slots: int = 0
    steps: int = 0


def play(
    engine: LocalEngine, scripts: Iterable[Script], concurrency: int, on_turn: Callable[[], object] = lambda: None
) -> Played:
    """Runs sessions to their ends, `concurrency` at a time, in order; the next one starts when one has ended."""
    out, waiting = Played(), list(scripts)
    running: list[tuple[Script, Watch | float]] = []
    begun = time.perf_counter()
    while running or waiting:
        moved = False
        for script, waits in running[:]:
            if _ready(waits):
                running.remove((script, waits))
                moved = True
                out.peak_slots = max(out.peak_slots, engine.stats().in_use)
                on_turn()
                _advance(script, running)
        while waiting and len(running) < concurrency:
            _advance(waiting.pop(0), running)
            moved = True
        if moved:
            continue
        started = time.perf_counter()
        if engine.step():
            out.busy_s += time.perf_counter() - started
            out.steps += 1
        elif sleeping := [waits for _, waits in running if isinstance(waits, float)]:
            time.sleep(max(0.0, min(sleeping) - time.perf_counter()))
        elif not any(_ready(waits) for _, waits in running):
            raise RuntimeError("every session waits, and the engine has nothing to do")
    out.wall_s = time.perf_counter() - begun
    return out


def _advance(script: Script, running: list[tuple[Script, Watch | float]]) -> None:
    waits = next(script, None)
    if waits is not None:
        running.append((script, waits))


def _ready(waits: Watch | float) -> bool:
    if isinstance(waits, Watch):
        if waits.error is not None:
            raise waits.error
        return waits.end is not None
    return time.perf_counter() >= waits
