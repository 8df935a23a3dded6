"""What is written down of a run: a `Turn` for each reply, an `ArmResult` for each arm. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cell = Literal["kept", "turned", "computed", "removed"]
Run = tuple[Cell, int]
"""So many neighbouring cells of one kind."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A span that gave way in this turn: `removed` tokens became `inserted`.

    `influence_remains`: rows that stay in the cache had been computed from it, by the server's receipt.
    """

    what: str
    removed: int
    inserted: int
    influence_remains: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the model and what the cache did for it.

    Attributes:
        did: what the model did: its calls, or its answer.
        prompt: tokens in the session when the model began to speak.
        prefix_hits, kept, turned, computed: of those; computed before the first token.
        generated: tokens decoded.
        first_token_ms: from having the new messages at hand to the first token, by the client's clock.
        cells: the session's list after this turn, what was cut from it in place.
    """

    index: int
    did: str
    cuts: tuple[Cut, ...]
    prompt: int
    prefix_hits: int
    kept: int
    turned: int
    computed: int
    generated: int
    first_token_ms: float
    cells: tuple[Run, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said to a task, and whether that was right."""

    question: str
    said: str
    expected: str

    @property
    def right(self) -> bool:
        return self.said.strip() == self.expected


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm's run. `rows_computed` is the server's own count, made where the model is called: prefill and decode."""

    name: str
    turns: tuple[Turn, ...]
    answers: tuple[Answer, ...]
    rows_computed: int
    slots_in_use: int
    wall_s: float

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)

    def total(self, what: Literal["prompt", "prefix_hits", "kept", "turned", "computed", "generated"]) -> int:
        return sum(getattr(turn, what) for turn in self.turns)


def runs(states: Sequence[Cell], removed: Mapping[int, int]) -> tuple[Run, ...]:
    """Cells run-length encoded, with `removed[i]` removed cells before cell i."""
    out: list[Run] = []

    def add(kind: Cell, count: int) -> None:
        if out and out[-1][0] == kind:
            count += out.pop()[1]
        if count:
            out.append((kind, count))

    for index in range(len(states) + 1):
        add("removed", removed.get(index, 0))
        if index < len(states):
            add(states[index], 1)
    return tuple(out)
