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

from leyline_server.cache.influence import Influence
from leyline_server.cache.order import EvictionOrder
from leyline_server.cache.slots import Holder, Slots, SlotTable, common, distinct, indices

Ids = NDArray[np.int32]
Namespace = tuple[str, ...]
_NONE: Final = np.zeros(0, np.int32)
_GROWS_TO: Final = 4096  # ids of a node to which more are added in place
_PEEK: Final = 256  # slots at a node's end that are looked at first: what can be freed mostly ends there


class _Node:
    """`ids` and `slots` of the edge that leads here, the first of them at position `depth`; its children differ in
    their first id."""

    __slots__ = ("children", "depth", "ids", "number", "parent", "slots", "used")

    def __init__(self, number: int, depth: int, ids: Ids, slots: Slots, parent: _Node | None, used: int) -> None:
        self.number, self.depth = number, depth
        self.ids, self.slots, self.parent, self.used = ids, slots, parent, used
        self.children: dict[int, _Node] = {}

    @property
    def age(self) -> tuple[int, int]:
        """Smaller gives way first. What leads to a node is at least as young, and gives way after it."""
        return self.used, -self.depth


class PrefixTree:
    """All namespaces' trees. `now` is the clock of the cache: a larger value is a later use."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._roots: dict[Namespace, _Node] = {}
        self._by_number: dict[int, _Node] = {}
        self._next_number = 0
        self._node_of = np.full(table.num_slots, -1, np.int32)  # the number of the node that names a slot
        self._order = EvictionOrder(self._by_number, self._frees)
        table.watch_cached.append(self._now_cached)

    def match(self, namespace: Namespace, ids: Ids, now: int) -> Slots:
        """The slots of the longest prefix of `ids` that is here. The caller retains what it takes."""
        found = [_NONE]
        for node, length in self._walk(namespace, ids):
            node.used = now
            found.append(node.slots[:length])
        return np.concatenate(found)

    def insert(self, namespace: Namespace, ids: Ids, slots: Slots, now: int) -> None:
        """Adds the part of this text that is not here yet, retaining its slots."""
        node = self._roots.setdefault(namespace, _Node(-1, 0, _NONE, _NONE, None, now))
        path = list(self._walk(namespace, ids))
        depth = sum(length for _, length in path)
        for child, length in path:
            node = child
            if length < len(node.ids) and depth < len(ids):
                node = self._split(node, length)  # what is not part of this text grows no younger
            node.used = now
        if depth == len(ids):
            return
        self._table.retain(slots[depth:], Holder.CACHE)
        if path and not node.children and len(node.ids) < _GROWS_TO:
            # A text that goes on stays one node, so that a long talk is no long path.
            node.ids = np.concatenate([node.ids, ids[depth:]])
            node.slots = np.concatenate([node.slots, slots[depth:]])
            self._node_of[slots[depth:]] = node.number
        else:
            node = self._add(depth, ids[depth:].copy(), slots[depth:].copy(), node, now)
        self._order.add(node)

    def used(self, slots: Slots) -> NDArray[np.int64]:
        """[n]: when the node that names the slot was last used; the largest number where none does."""
        unnamed = np.iinfo(np.int64).max
        numbers = self._node_of[indices(slots)].tolist()
        return np.array([unnamed if number < 0 else self._by_number[number].used for number in numbers], np.int64)

    def touch(self, slots: Slots, now: int) -> None:
        """These rows were used from elsewhere: they, and what leads to them, are as young as a text that goes on. What
        stands behind them in a node grows no younger."""
        numbers = self._node_of[indices(slots)]
        for number in distinct(numbers) - {-1}:
            node = self._by_number[number]
            upto = int(self._table.written_at[slots[numbers == number]].max()) + 1 - node.depth
            above: _Node | None = self._split(node, upto) if upto < len(node.ids) else node
            while above is not None and above.used < now:
                above.used = now
                above = above.parent

    def cut(self, namespace: Namespace, influence: Influence) -> Slots:
        """Drops every row of this influence, with all that follows it. Returns the slots whose references the caller
        now holds and must release."""
        dropped = [_NONE]
        root = self._roots.get(namespace)
        stack = list(root.children.values()) if root else []
        while stack:
            node = stack.pop()
            first = influence.first_in_rows(self._table, node.slots, node.depth)
            if first is not None:
                dropped.append(self._drop(node, first))
            else:
                stack.extend(node.children.values())
        return np.concatenate(dropped)

    def oldest(self) -> int | None:
        """When the node that `evict` would take from was last used; None when no eviction frees a slot."""
        node = self._order.first()
        return None if node is None else node.used

    def evict(self, wanted: int) -> Slots:
        """Takes rows from the end of the least recently used node, with all below it, until `wanted` slots would be
        free or the node is gone. Returns the slots to release."""
        node = self._order.first()
        assert node is not None, "evict without oldest"
        for size in (4 * wanted, len(node.ids)):
            from_end = np.cumsum(self._table.only_cached(node.slots[-size:])[::-1])
            enough = int(np.searchsorted(from_end, wanted)) + 1
            if enough <= len(from_end):
                break
        return self._drop(node, max(0, len(node.ids) - enough))

    def clear(self) -> Slots:
        """Drops everything. Returns the slots to release."""
        held = np.concatenate([_NONE, *(node.slots for node in self._nodes())])
        for node in list(self._nodes()):
            self._remove(node)
        self._roots.clear()
        self._order.clear()
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
            assert node.depth == node.parent.depth + len(node.parent.ids)
            assert node.used <= node.parent.used or node.parent.number < 0, "a node is younger than what leads to it"
            assert self._by_number[node.number] is node
            assert np.all(self._node_of[node.slots] == node.number)
            frees = self._table.only_cached(node.slots).any()
            assert node in self._order or not frees, "eviction would pass over a node"
        named = sum(len(node.slots) for node in self._nodes())
        assert np.count_nonzero(self._node_of >= 0) == named, "a slot names a node that does not name it"

    def _walk(self, namespace: Namespace, ids: Ids) -> Iterator[tuple[_Node, int]]:
        """Each node on the path of `ids`, with how many of its ids match; the last may match in part."""
        node = self._roots.get(namespace)
        depth = 0
        while node is not None and depth < len(ids):
            child = node.children.get(int(ids[depth]))
            if child is None:
                return
            length = common(child.ids, ids[depth : depth + len(child.ids)])
            yield child, length
            if length < len(child.ids):
                return
            depth += length
            node = child

    def _split(self, node: _Node, length: int) -> _Node:
        """Cuts a node's edge in two; returns the upper half."""
        assert node.parent is not None
        upper = self._add(node.depth, node.ids[:length], node.slots[:length], node.parent, node.used)
        node.ids, node.slots, node.parent = node.ids[length:], node.slots[length:], upper
        node.depth += length
        upper.children[int(node.ids[0])] = node
        self._order.add(upper)
        return upper

    def _add(self, depth: int, ids: Ids, slots: Slots, parent: _Node, used: int) -> _Node:
        node = _Node(self._next_number, depth, ids, slots, parent, used)
        self._next_number += 1
        self._by_number[node.number] = node
        self._node_of[slots] = node.number
        parent.children[int(ids[0])] = node
        return node

    def _drop(self, node: _Node, keep: int) -> Slots:
        """Removes a node's rows from `keep` on, and all below it."""
        assert node.parent is not None
        below = [sub for child in node.children.values() for sub in self._subtree(child)]
        gone = np.concatenate([node.slots[keep:], *(sub.slots for sub in below)])
        for sub in below:
            self._remove(sub)
        node.children = {}
        if keep:
            self._node_of[node.slots[keep:]] = -1
            node.ids, node.slots = node.ids[:keep], node.slots[:keep]
        else:
            self._remove(node)
            del node.parent.children[int(node.ids[0])]
        return gone

    def _remove(self, node: _Node) -> None:
        del self._by_number[node.number]
        self._node_of[node.slots] = -1

    # ------------------------------------------------------------ the order of eviction

    def _now_cached(self, slots: Slots) -> None:
        """No session holds these slots any more: their nodes have something to free."""
        for number in distinct(self._node_of[indices(slots)]) - {-1}:
            self._order.add(self._by_number[number])

    def _frees(self, node: _Node) -> bool:
        return any(self._table.only_cached(node.slots[-size:]).any() for size in (_PEEK, len(node.slots)))

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
