"""A chunk of the registry, and how chunks hang together: what was computed from what.

Owns the links. They form a tree: the parent of a chunk is the last one registered in front of it in its text, whether
they touch or not, so all that was computed from a row is in its chunk and below it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.slots import Slots

Ids = NDArray[np.int32]
Namespace = tuple[str, ...]


class Chunk:
    """`ids` and `slots` of a stretch of a text's rows, the first of them at position `start`. `fingerprints`: hashes
    that lead here, and the slots that they lead to."""

    __slots__ = ("children", "fingerprints", "ids", "namespace", "number", "parent", "slots", "start", "used")

    def __init__(self, number: int, namespace: Namespace, start: int, ids: Ids, slots: Slots, used: int) -> None:
        self.number, self.namespace, self.used = number, namespace, used
        self.start, self.ids, self.slots = start, ids, slots
        self.fingerprints: list[tuple[int, int]] = []
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

    def hang(self, parent: Chunk | None) -> None:
        """Makes another its parent."""
        if self.parent is not None:
            self.parent.children.remove(self)
        self.parent = parent
        if parent is not None:
            parent.children.append(self)

    def leave(self) -> None:
        """Takes it out: what hangs below hangs where it hung."""
        for child in list(self.children):
            child.hang(self.parent)
        self.hang(None)

    def below(self) -> Iterator[Chunk]:
        """It, and all that was computed from it."""
        stack = [self]
        while stack:
            one = stack.pop()
            yield one
            stack += one.children
