"""Sessions as the server has them, without a model: what they take from the caches, and what they leave there.

The engine's own code on its own caches, with rows of one number. A session is one prompt: it takes, computes what is
pending, publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from benchmarks.content_arms import NAMESPACE
from benchmarks.content_input import Ids, Text
from leyline_proto import leyline_pb2 as pb
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.cache.kv_cache import KVCache
from leyline_server.cache.pool import Pool
from leyline_server.edit.rows import Rows
from leyline_server.engine.reuse import publish, take_content, take_prefix
from leyline_server.engine.sequence import SequenceState

CONTENT: Final = Reuse(pb.REUSE_CONTENT)
ARMS: Final = {
    "PREFIX": PREFIX,
    "CONTENT": CONTENT,
    **{f"CONTENT, least share {share}": Reuse(pb.REUSE_CONTENT, least_share=share) for share in (0.5, 0.75, 0.9)},
}


class Sessions:
    """A pool, its caches with `budget` rows of content, and the sessions that come."""

    def __init__(self, num_slots: int, budget: int) -> None:
        self.cache = KVCache(Pool(1, num_slots, 1, 1, torch.float32, torch.device("cpu")), budget)

    def open(self, ids: Ids, reuse: Reuse) -> tuple[SequenceState, int]:
        """A session, computed, and how many of its rows it found."""
        cache = self.cache
        state = SequenceState(0, NAMESPACE, reuse, Rows.empty().appended(ids), cache.tick(), cache.table)
        found = take_prefix(cache, state) + len(take_content(cache, state))
        index = state.rows.pending
        state.rows = state.rows.filled(index, cache.allocate(index.astype("int32")))
        state.rows.note_contexts(cache.table, index)
        publish(cache, state)
        return state, found

    def close(self, session: SequenceState) -> None:
        self.cache.release(session.rows.slots)

    def check_integrity(self, sessions: Iterable[SequenceState] = ()) -> None:
        self.cache.check_integrity([one.rows.slots for one in sessions])


def reused(lists: Iterable[Sequence[Text]], reuse: Reuse) -> int:
    """How many ids of all prompts are found, each prompt a session that is closed before the next. The pool holds a
    list's prompts all, so nothing gives way."""
    found = 0
    for texts in lists:
        room = sum(len(text.ids) for text in texts)
        sessions = Sessions(room, room)
        for text in texts:
            session, own = sessions.open(text.ids, reuse)
            sessions.close(session)
            found += own
        sessions.check_integrity()
    return found
