"""The prefix tree: exact rows of texts that were computed before, found again by their tokens.

Owns one reference (kind CACHE) on each slot it names. A radix tree over token ids, one root a namespace, so that
one tenant's text never answers another's. Only exact rows enter (the engine sees to that). It does not know
sessions or positions: an exact row's position is its depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.slots import Holder, Slots, SlotTable

Ids = NDArray[np.int32]
Namespace = tuple[str, ...]
_NONE: Final = np.zeros(0, np.int32)


class _Node:
    """`ids` and `slots` of the edge that leads here; its children differ in their first id."""

    __slots__ = ("children", "ids", "parent", "slots", "used")

    def __init__(self, ids: Ids, slots: Slots, parent: _Node | None, used: int) -> None:
        self.ids, self.slots, self.parent, self.used = ids, slots, parent, used
        self.children: dict[int, _Node] = {}


class PrefixTree:
    """All namespaces' trees. `now` is the clock of the cache: a larger value is a later use."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._roots: dict[Namespace, _Node] = {}

    def match(self, namespace: Namespace, ids: Ids, now: int) -> Slots:
        """The slots of the longest prefix of `ids` that is here. The caller retains what it takes."""
        found = [_NONE]
        for node, length in self._walk(namespace, ids):
            node.used = now
            found.append(node.slots[:length])
        return np.concatenate(found)

    def insert(self, namespace: Namespace, ids: Ids, slots: Slots, now: int) -> None:
        """Adds the part of this text that is not here yet, retaining its slots."""
        node = self._roots.setdefault(namespace, _Node(_NONE, _NONE, None, now))
        path = list(self._walk(namespace, ids))
        depth = sum(length for _, length in path)
        for child, length in path:
            node = child
            if length < len(node.ids) and depth < len(ids):
                node = self._split(node, length)  # what is not part of this text grows no younger
            node.used = now
        if depth < len(ids):
            leaf = _Node(ids[depth:].copy(), slots[depth:].copy(), node, now)
            self._table.retain(leaf.slots, Holder.CACHE)
            node.children[int(leaf.ids[0])] = leaf

    def cut(self, namespace: Namespace, contexts: NDArray[np.uint64]) -> Slots:
        """Drops every row that was computed from one of these contexts, with all that follows it. Returns the slots
        whose references the caller now holds and must release."""
        dropped = [_NONE]
        root = self._roots.get(namespace)
        stack = list(root.children.values()) if root else []
        while stack:
            node = stack.pop()
            hits = np.flatnonzero(np.isin(self._table.context[node.slots], contexts))
            if len(hits):
                dropped.append(self._drop(node, int(hits[0])))
            else:
                stack.extend(node.children.values())
        return np.concatenate(dropped)

    def oldest(self) -> int | None:
        """When the node that `evict` would take from was last used; None when no eviction frees a slot."""
        node = self._coldest()
        return None if node is None else node.used

    def evict(self, wanted: int) -> Slots:
        """Takes rows from the end of the least recently used node, with all below it, until `wanted` slots would be
        free or the node is gone. Returns the slots to release."""
        node = self._coldest()
        assert node is not None, "evict without oldest"
        from_end = np.cumsum(self._table.only_cached(node.slots)[::-1])
        enough = int(np.searchsorted(from_end, wanted)) + 1
        return self._drop(node, max(0, len(node.ids) - enough))

    def clear(self) -> Slots:
        """Drops everything. Returns the slots to release."""
        held = np.concatenate([_NONE, *(node.slots for node in self._nodes())])
        self._roots.clear()
        return held

    def slots(self) -> list[Slots]:
        return [node.slots for node in self._nodes()]

    def check_integrity(self) -> None:
        """Asserts the shape of the tree."""
        for node in self._nodes():
            assert len(node.ids) == len(node.slots) > 0
            assert node.parent is not None
            assert node.parent.children[int(node.ids[0])] is node
            assert np.all(self._table.context[node.slots] != 0), "the tree holds a row that is not exact"

    def _walk(self, namespace: Namespace, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Each node on the path of `ids`, with how many of its ids match; the last may match in part."""
        node = self._roots.get(namespace)
        depth = 0
        while node is not None and depth < len(ids):
            child = node.children.get(int(ids[depth]))
            if child is None:
                return
            ahead = ids[depth : depth + len(child.ids)]
            differs = np.flatnonzero(child.ids[: len(ahead)] != ahead)
            length = int(differs[0]) if len(differs) else len(ahead)
            yield child, length
            if length < len(child.ids):
                return
            depth += length
            node = child

    def _split(self, node: _Node, length: int) -> _Node:
        """Cuts a node's edge in two; returns the upper half."""
        assert node.parent is not None
        upper = _Node(node.ids[:length], node.slots[:length], node.parent, node.used)
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[length:], node.slots[length:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _drop(self, node: _Node, keep: int) -> Slots:
        """Removes a node's rows from `keep` on, and all below it."""
        assert node.parent is not None
        below = [sub.slots for child in node.children.values() for sub in self._subtree(child)]
        gone = np.concatenate([node.slots[keep:], *below])
        node.children = {}
        if keep:
            node.ids, node.slots = node.ids[:keep], node.slots[:keep]
        else:
            del node.parent.children[int(node.ids[0])]
        return gone

    def _coldest(self) -> _Node | None:
        """The least recently used of the lowest nodes that have something to free."""
        freeable = [node for node in self._nodes() if self._table.only_cached(node.slots).any()]
        above: set[_Node] = set()
        for node in freeable:
            parent = node.parent
            while parent is not None and parent not in above:
                above.add(parent)
                parent = parent.parent
        return min((node for node in freeable if node not in above), key=lambda node: node.used, default=None)

    def _nodes(self) -> Iterator[_Node]:
        for root in self._roots.values():
            for child in root.children.values():
                yield from self._subtree(child)

    def _subtree(self, node: _Node) -> Iterator[_Node]:
        stack = [node]
        while stack:
            top = stack.pop()
            yield top
            stack.extend(top.children.values())
