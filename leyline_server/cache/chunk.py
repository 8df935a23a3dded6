"""A chunk of the registry, and how chunks hang together: what was computed from what.

Owns the links. They form a tree: the parent of a chunk is the last one registered in front of it in its text, whether
they touch or not. Of the rows between the two, which are in no chunk, it has the contexts: so all that was computed
from a row is in its chunk and below it, or behind a gap that names it and below that.
"""

from __future__ import annotations

from collections.abc import Iterator

from leyline_server.cache.slots import Slots
from leyline_server.edit.rows import Contexts, Ids

Namespace = tuple[str, ...]


class Chunk:
    """`ids` and `slots` of a stretch of a text's rows, the first of them at position `start`. `fingerprints`: hashes
    that lead here, and the slots that they lead to. `gap`: contexts of the rows between its parent and it."""

    __slots__ = ("children", "fingerprints", "gap", "ids", "namespace", "number", "parent", "slots", "start", "used")

    def __init__(self, number: int, namespace: Namespace, start: int, ids: Ids, slots: Slots, used: int) -> None:
        self.number, self.namespace, self.used = number, namespace, used
        self.start, self.ids, self.slots = start, ids, slots
        self.fingerprints: list[tuple[int, int]] = []
        self.gap: list[Contexts] = []
        self.parent: Chunk | None = None
        self.children: list[Chunk] = []

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def age(self) -> tuple[int, int]:
        """Smaller gives way first: of a text its end."""
        return self.used, -self.number

    @property
    def before(self) -> Chunk | None:
        """The chunk that this one follows without a gap."""
        return self.parent if self.parent is not None and self.parent.end == self.start else None

    def after(self, token: int) -> Chunk | None:
        """A chunk that follows without a gap and begins with this id: texts may go on from here in several ways."""
        return next((one for one in self.children if one.start == self.end and one.ids[0] == token), None)

    def hang(self, parent: Chunk | None, gap: list[Contexts]) -> None:
        """Makes another, which begins in front of it, its parent. gap: of the rows between the two."""
        if self.parent is not None:
            self.parent.children.remove(self)
        self.parent, self.gap = parent, gap
        if parent is not None:
            parent.children.append(self)

    def leave(self, contexts: Contexts) -> None:
        """Takes it out: what hangs below hangs where it hung, and its rows, of these contexts, are in the gap."""
        for child in list(self.children):
            child.hang(self.parent, [*self.gap, contexts, *child.gap])
        self.hang(None, [])

    def below(self) -> Iterator[Chunk]:
        """It, and all that was computed from it."""
        stack = [self]
        while stack:
            one = stack.pop()
            yield one
            stack += one.children
