"""What FORGET does beyond the session's own list: the caches lose every row that was computed from the span.

Owns nothing; acts on the KV cache. Rows are found by the contexts they were computed from, so that the prefix tree
loses the text wherever it was published, also when its slots are another session's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.influence import Influence
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.slots import Slots, indices
from leyline_server.edit.plan import Plan, PlannedEdit
from leyline_server.engine.sequence import SequenceState


def influenced(cache: KVCache, state: SequenceState, item: PlannedEdit, plan: Plan) -> Influence:
    """All rows that were computed from the span, whoever holds them. To be asked before the list changes.

    They are the span's rows and the rows behind it, rows kept for undo, and rows that this sequence lost to an
    eviction while the tree may hold them still; and those of the text as it stands, which another may have computed.
    Content hits behind the span were computed elsewhere, from other text.
    """
    rows, start, table = state.rows, item.edit.start, cache.table
    found = Influence()
    found.add_rows(table, item.ids, item.slots)
    own = _own(cache, state, plan.tail_slots)
    found.add_rows(table, plan.tail_ids[own], plan.tail_slots[own])
    for edit_id in item.edit.forgotten:
        cache.kept.add_to(found, (state.id, edit_id))
    for edit_id in item.edit.stale:
        cache.kept.add_to(found, (state.id, edit_id), state.borrowed)
    if len(state.lost):
        found.add_scattered(np.setdiff1d(state.lost, rows.contexts[:start]))
    if len(item.ids):
        found.add_text(rows.contexts, start)
    found.add_scattered(table.context[indices(cache.chunks.reached(state.namespace, found))])
    return found


def without_reached(cache: KVCache, state: SequenceState, plan: Plan, influences: Sequence[Influence]) -> Plan:
    """Content hits in front of a span, which their source computed from it, and what was computed over them: the list
    becomes pending from the first of them on."""
    slots = plan.rows.slots
    if not influences or not len(state.borrowed):
        return plan
    index = np.flatnonzero(slots >= 0)
    index = index[~_own(cache, state, slots[index])]
    contexts = cache.table.context[indices(slots[index])]
    index = index[np.any([influence.among(contexts) for influence in influences], axis=0)]
    if not len(index):
        return plan
    behind = slots[int(index[0]) :]
    return replace(plan, rows=plan.rows.pending_from(int(index[0])), reached=behind[behind >= 0])


def held_elsewhere(
    cache: KVCache,
    state: SequenceState,
    others: Iterable[SequenceState],
    item: PlannedEdit,
    plan: Plan,
    influence: Influence,
) -> tuple[int, ...]:
    """The other sequences of the namespace that hold some of what a FORGET drops: the rows, or the same text's."""
    kept, table = cache.kept, cache.table
    from_list = np.concatenate([item.slots, plan.tail_slots[_own(cache, state, plan.tail_slots)]])
    cut = [kept.get((state.id, one))[1] for one in item.edit.forgotten if kept.has((state.id, one))]
    behind = [kept.get((state.id, one))[1] for one in item.edit.stale if kept.has((state.id, one))]
    from_kept = np.concatenate([from_list[:0], *cut, *(slots[_own(cache, state, slots)] for slots in behind)])
    gone = np.concatenate([from_list, from_kept])
    # The references say whether any list but this one can hold them.
    shared = table.most_sessions(from_list) > 1 or table.most_sessions(from_kept) > 0
    found = []
    with table.marking(gone) as holds_some:
        for other in others:
            if other is state or other.namespace != state.namespace:
                continue
            rows, own = other.rows, other.rows.own_text_upto
            lists = kept.holding(other.id)
            # Below `own` a row was computed from the text that stands there, so the text says whether to look closer.
            suspect = influence.first_in_text(rows.contexts[:own])
            lists.append(rows.slots[own if suspect is None else suspect :])
            held = np.concatenate(lists)
            held = held[held >= 0]
            if (
                (shared and holds_some(rows.slots))
                or any(map(holds_some, lists[:-1]))
                or influence.among(table.context[indices(held)]).any()
            ):
                found.append(other.id)
    return tuple(found)


def _own(cache: KVCache, state: SequenceState, slots: Slots) -> NDArray[np.bool_]:
    """[n]: which of the rows behind the span were computed behind it; the others are content hits."""
    return np.isin(cache.table.context[indices(slots)], state.borrowed, invert=True)


def forget(cache: KVCache, state: SequenceState, item: PlannedEdit, influence: Influence) -> None:
    """Drops what was computed from the span from kept rows, tree and chunk registry. The sequence's own references are
    still the caller's to release."""
    gone = [cache.kept.drop((state.id, edit_id)) for edit_id in item.edit.forgotten]
    gone += [cache.kept.drop_slots((state.id, edit_id)) for edit_id in item.edit.stale]
    gone.append(cache.tree.cut(state.namespace, influence))
    gone.append(cache.chunks.cut(state.namespace, influence))
    for slots in gone:
        cache.release_cached(slots)
