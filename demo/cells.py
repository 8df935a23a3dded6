"""Follows a session's list from what the server reports, cell by cell: where was each row written, where does it stand?

The picture needs this; the demo's numbers don't: they are the server's.
"""

from __future__ import annotations

from collections.abc import Iterable

from demo.record import Cell, Run, runs
from leyline_sdk import AppliedEdit, Mode, Reply

PENDING = -1


class LiveList:
    """One session's list. A cell holds the position its row was written at, or PENDING."""

    def __init__(self) -> None:
        self._written: list[int] = []

    def turn(self, edits: Iterable[AppliedEdit], reply: Reply) -> tuple[Run, ...]:
        """The list in a turn that made these edits, then computed, then decoded."""
        removed: dict[int, int] = {}
        for receipt in sorted((edit.receipt for edit in edits), key=lambda r: r.at):  # left of `at` all is final
            at = receipt.at
            self._written[at : at + receipt.removed] = [PENDING] * receipt.inserted
            if receipt.mode is Mode.FORGET:
                self._written[at:] = [PENDING] * (len(self._written) - at)
            removed[at] = removed.get(at, 0) + receipt.removed
        self._written += [PENDING] * (reply.usage.context - len(self._written))
        states = self._compute(reply.cache.prefix_hit)
        states += ["computed"] * reply.usage.generated
        self._written += range(len(self._written), len(self._written) + reply.usage.generated)
        self._written[-1] = PENDING  # the last token was sampled and not yet evaluated
        return runs(states, removed)

    def _compute(self, prefix_hits: int) -> list[Cell]:
        states: list[Cell] = []
        for position, written in enumerate(self._written):
            if written == PENDING and prefix_hits:
                prefix_hits -= 1
                states.append("kept")
            elif written == PENDING:
                states.append("computed")
            else:
                states.append("kept" if written == position else "turned")
            if written == PENDING:
                self._written[position] = position
        return states
