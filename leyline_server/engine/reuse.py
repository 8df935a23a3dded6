"""What a list takes from the caches before anything of it is computed, an exact prefix first, then equal content; and
what it leaves there.

Owns nothing; acts on the KV cache and one sequence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.slots import PENDING, ascending, indices, runs
from leyline_server.engine.sequence import SequenceState


def take_prefix(cache: KVCache, state: SequenceState) -> int:
    """Pending entries at the front take slots of the prefix tree. Returns how many.

    Stops at the first kept entry that is not exact: what follows it has to be computed over it, whatever another
    session has published, so that an edit's result never depends on who was there before.
    """
    taken = 0
    found = cache.tree.match(state.namespace, state.rows.ids[:-1], cache.tick())
    while (start := state.rows.exact_upto(cache.table)) < len(found) and state.rows.slots[start] == PENDING:
        kept = np.flatnonzero(state.rows.slots[start : len(found)] >= 0)
        end = start + int(kept[0]) if len(kept) else len(found)
        cache.retain(found[start:end])
        state.rows = state.rows.filled(np.arange(start, end), found[start:end])
        taken += end - start
    return taken


def take_content(cache: KVCache, state: SequenceState) -> NDArray[np.int64]:
    """Pending entries, but the last, take rows of the same content from the chunk registry. Returns their indices [n],
    ascending.

    What the sequence's repair names of each hit stays pending, or is in doubt. Where all is exact so far, and hits save
    less than the sequence's least share, only those are taken that are exact here too.
    """
    rows, reuse = state.rows, state.reuse
    hits, slots = [np.zeros(0, np.int64)], [rows.slots[:0]]
    if not reuse.takes or reuse.repair.share == 1:
        return hits[0]
    waits = rows.slots[:-1] == PENDING
    waits[: state.takes_content_from] = False
    for start, end in runs(waits):
        for hit in cache.chunks.match(state.namespace, rows.ids[start:end]):
            first = start + hit.start
            hits.append(np.arange(first, first + len(hit.slots))[reuse.repair.first :])
            slots.append(hit.slots[reuse.repair.first :])
    taken, found = np.concatenate(hits), np.concatenate(slots)
    foreign = cache.table.context[indices(found)] != rows.contexts[taken]
    saved = len(taken) * (1 - reuse.repair.share)
    if saved < reuse.least_share * rows.num_pending and rows.all_exact(cache.table):
        # Computed whole the text stays exact, and others find what is new in it. What is exact needs no repair.
        taken, found, foreign, hits = taken[~foreign], found[~foreign], foreign[~foreign], []
    if len(taken):
        cache.retain(found)
        cache.touch(found)
        rows = rows.borrowed(taken, found)
        if reuse.repair.share:
            rows = rows.doubted([(int(hit[0]), int(hit[-1]) + 1) for hit in hits if len(hit)], reuse.repair.share)
        state.borrowed = ascending(np.concatenate([state.borrowed, cache.table.context[indices(found[foreign])]]))
        state.rows = rows
    return taken


def publish(cache: KVCache, state: SequenceState) -> None:
    """Puts the exact front of the list into the prefix tree, and into the chunk registry where the sequence is open to
    that: nothing behind an edit or a content hit answers another session."""
    upto = state.rows.exact_upto(cache.table)
    if upto:
        ids, slots, now = state.rows.ids[:upto], state.rows.slots[:upto], cache.tick()
        cache.tree.insert(state.namespace, ids, slots, now)
        if state.reuse.registers:
            examined, gone = cache.chunks.register(state.namespace, ids, slots, state.rows.registered_upto, now)
            state.rows = replace(state.rows, registered_upto=examined)
            cache.release_cached(gone)
