"""What FORGET does beyond the session's own list: the caches lose every row that was computed from the span.

Owns nothing; acts on the KV cache. Rows are found by the contexts they were computed from, so that the prefix tree
loses the text wherever it was published, also when its slots are another session's.
"""

from __future__ import annotations

import numpy as np

from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.slots import Slots
from leyline_server.edit.plan import PlannedEdit
from leyline_server.edit.rows import Contexts
from leyline_server.engine.sequence import SequenceState


def influenced(cache: KVCache, state: SequenceState, item: PlannedEdit, tail_slots: Slots) -> Contexts:
    """The contexts of all rows that were computed from the span, whoever holds them. To be asked before the list
    changes.

    They are those of the span's rows and of the rows behind it, of rows kept for undo, and of rows that this sequence
    lost to an eviction while the tree may hold them still; and of the text as it stands, which another may have
    computed.
    """
    rows, start = state.rows, item.edit.start
    found = [cache.table.context[slots[slots >= 0]] for slots in (item.slots, tail_slots)]
    found += [cache.kept.contexts((state.id, edit_id)) for edit_id in (*item.edit.forgotten, *item.edit.stale)]
    found.append(np.setdiff1d(state.lost, rows.contexts[:start]))
    if len(item.ids):
        found.append(rows.contexts[start:])
    contexts = np.unique(np.concatenate(found))
    return contexts[contexts != 0]


def held_elsewhere(
    cache: KVCache, state: SequenceState, others: list[SequenceState], gone: list[Slots], contexts: Contexts
) -> tuple[int, ...]:
    """The other sequences of the namespace that hold some of what a FORGET drops: the rows, or the same text's."""
    slots = np.concatenate(gone)
    slots = slots[slots >= 0]
    found = []
    for other in others:
        if other is state or other.namespace != state.namespace:
            continue
        held = np.concatenate([other.rows.slots, *cache.kept.holding(other.id)])
        held = held[held >= 0]
        if np.isin(held, slots).any() or np.isin(cache.table.context[held], contexts).any():
            found.append(other.id)
    return tuple(found)


def forget(cache: KVCache, state: SequenceState, item: PlannedEdit, contexts: Contexts) -> None:
    """Drops what was computed from the span from kept rows and tree. The sequence's own references are still the
    caller's to release."""
    gone = [cache.kept.drop((state.id, edit_id)) for edit_id in item.edit.forgotten]
    gone += [cache.kept.drop_slots((state.id, edit_id)) for edit_id in item.edit.stale]
    gone.append(cache.tree.cut(state.namespace, contexts))
    for slots in gone:
        cache.release_cached(slots)
