"""Where fingerprints lead: by namespace and hash, the slots of some rows that its runs begin with.

Owns nothing but the numbers. It does not know what a slot holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from leyline_server.cache.chunk import Namespace

_OWNERS: Final = 4
"""Texts that one fingerprint leads to: of those that have a short run in common the one that agrees most counts."""


class FingerprintIndex:
    def __init__(self) -> None:
        self._slots: dict[Namespace, dict[int, list[int]]] = {}

    def of(self, namespace: Namespace) -> Mapping[int, list[int]]:
        """The slots of each hash; none is empty."""
        return self._slots.get(namespace, {})

    def add(self, namespace: Namespace, fingerprint: int, slot: int) -> bool:
        """Whether it was added: not where it leads there already, or to enough."""
        by_hash = self._slots.setdefault(namespace, {})
        slots = by_hash.setdefault(fingerprint, [])
        if len(slots) >= _OWNERS or slot in slots:
            return False
        slots.append(slot)
        return True

    def remove(self, namespace: Namespace, leads: Iterable[tuple[int, int]]) -> None:
        """These hashes lead to these slots no more."""
        by_hash = self._slots.get(namespace, {})
        for fingerprint, slot in leads:
            by_hash[fingerprint].remove(slot)
            if not by_hash[fingerprint]:
                del by_hash[fingerprint]
        if not by_hash:
            self._slots.pop(namespace, None)

    def __iter__(self) -> Iterator[tuple[Namespace, int, int]]:
        """All there are."""
        for namespace, by_hash in self._slots.items():
            assert by_hash
            for fingerprint, slots in by_hash.items():
                assert slots
                yield from ((namespace, fingerprint, slot) for slot in slots)
