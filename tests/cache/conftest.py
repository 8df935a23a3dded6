"""Texts with their rows, as a session would hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from leyline_server.cache.slots import SlotTable
from leyline_server.edit.rows import Rows


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(64)


@pytest.fixture
def computed(table: SlotTable) -> Callable[[Sequence[int]], Rows]:
    """A text whose rows were computed honestly, front to back, into fresh slots held by a session."""

    def compute(ids: Sequence[int]) -> Rows:
        rows = Rows.empty().appended(ids)
        index = np.arange(len(ids))
        rows = rows.filled(index, table.allocate(index.astype(np.int32)))
        rows.note_contexts(table, index)
        return rows

    return compute
