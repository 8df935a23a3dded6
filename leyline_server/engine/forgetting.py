"""What FORGET does beyond the session's own list: the caches lose every row that was computed from the span.

Owns nothing; acts on the KV cache. Rows are found by the contexts they were computed from, so that the prefix tree
loses the text wherever it was published, also when its slots are another session's.
"""

from __future__ import annotations

import numpy as np

from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.slots import Slots
from leyline_server.edit.plan import PlannedEdit
from leyline_server.engine.requests import SequenceState


def forget(cache: KVCache, state: SequenceState, item: PlannedEdit, tail_slots: Slots) -> None:
    """Drops the span, its tail and the edits that go with it from kept rows and tree, and marks their slots to be
    zeroed. The sequence's own references are still the caller's to release."""
    gone = [item.slots, tail_slots]
    contexts = [cache.table.context[slots[slots >= 0]] for slots in gone]
    for edit_id in item.edit.forgotten:
        contexts.append(cache.kept.contexts((state.id, edit_id)))
        slots = cache.kept.drop((state.id, edit_id))
        cache.scrub(slots)
        cache.release_cached(slots)
    for edit_id in item.edit.stale:
        contexts.append(cache.kept.contexts((state.id, edit_id)))
        slots = cache.kept.drop_slots((state.id, edit_id))
        cache.scrub(slots)
        cache.release_cached(slots)
    for slots in gone:
        cache.scrub(slots)
    published = np.concatenate(contexts)
    published = published[published != 0]
    if len(published):
        slots = cache.tree.cut(state.namespace, published)
        cache.scrub(slots)
        cache.release_cached(slots)
