"""The seam between sessions and whatever computes: what an engine keeps and does for lists of tokens.

Owns the interface and the values that cross it. Above it are messages, versions and tools; below it slots, pools and
schedulers. `LocalEngine` is the one here; another one (a serving engine with an MLA pool of its own) can stand behind
the same service. All calls come from one thread, which also calls `step`; listeners are called on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from leyline_proto.refusal import Refusal
from leyline_proto.repair import NO_REPAIR, Repair
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.sampling import SamplingParams

SequenceId = int
Namespace = tuple[str, ...]
"""(tenant, model digest): texts of one namespace never answer another's."""


@dataclass(frozen=True, slots=True)
class RowEdit:
    """[start, end) gives way to `ids`, in the coordinates before any edit of the same call.

    forget: what follows is computed again, and the rows leave the caches; else they are kept for undo as `edit_id`.
    forgotten: earlier edits whose kept rows and text go for good. stale: those whose rows go and whose text stays.
    repair: what is computed again behind the span, unless it forgets.
    """

    start: int
    end: int
    ids: tuple[int, ...]
    edit_id: str
    forget: bool = False
    forgotten: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    repair: Repair = NO_REPAIR


@dataclass(frozen=True, slots=True)
class RowReceipt:
    """What one edit did, in entries; `at`, `kept`, `turned`, `to_compute` and `exact_upto` are of the final list.

    repaired: entries with KV that it has computed again; `to_compute` counts them. Which ones those of a share are is
    not known before the next request: until then they are among `kept` and `turned`, and not among `freed`.
    """

    at: int
    removed: int
    inserted: int
    kept: int
    turned: int
    to_compute: int
    freed: int
    exact_upto: int
    influence_remains: bool
    held_elsewhere: tuple[SequenceId, ...] = ()
    repaired: int = 0


@dataclass(frozen=True, slots=True)
class Restored:
    restored: int
    with_kv: int


class MissReason(Enum):
    """Why entries had to be computed."""

    APPEND = "APPEND"
    EDIT = "EDIT"
    EVICTED = "EVICTED"
    COLD = "COLD"


@dataclass(frozen=True, slots=True)
class HitReport:
    """prefix_hit + content_hit + kept + computed = entries of the list when the request was admitted.

    content_spans: [start, end) of each stretch of the content hits.
    """

    prefix_hit: int
    content_spans: tuple[tuple[int, int], ...]
    kept: int
    turned: int
    computed: int
    first_divergence: int | None
    reason: MissReason

    @property
    def content_hit(self) -> int:
        return sum(end - start for start, end in self.content_spans)

    @property
    def reused(self) -> int:
        return self.prefix_hit + self.content_hit + self.kept


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What the engine has to know of a Generate. Stop strings are the listener's business: it sees every token."""

    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    force_ids: tuple[int, ...] = ()


class EndReason(Enum):
    DONE = "DONE"  # computed what was pending; no Generate
    STOP = "STOP"  # a stop id
    LISTENER = "LISTENER"  # the listener asked to stop
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class Listener(Protocol):
    """Told of one request's progress, on the engine's thread. Must not block."""

    def started(self, report: HitReport) -> None:
        """The request was admitted; what it found in the cache."""

    def token(self, token_id: int) -> bool:
        """A token was appended to the sequence. True ends the request here."""
        ...

    def ended(self, reason: EndReason, error: Refusal | None) -> None:
        """Once, last. With FAILED, `error` says why, and the sequence holds the tokens that were told."""


class Request(Protocol):
    """A running or queued compute or generate. `cancel` takes effect between steps."""

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_slots: int
    free: int
    in_use: int
    cached: int
    running: int
    queued: int
    rows_computed: int  # since start, counted where the model is called
    steps: int


class Engine(Protocol):
    """Keeps the KV of sequences. Every method leaves everything as it was when it raises."""

    @property
    def amortize_refused(self) -> str:
        """Why rows can't move in this model; empty when they can."""
        ...

    @property
    def repair_share_refused(self) -> str:
        """Why it can't be measured which rows deviate; empty when it can."""
        ...

    @property
    def content_reuse_refused(self) -> str:
        """Why nothing is found by its content; empty when it is."""
        ...

    def open(self, namespace: Namespace, reuse: Reuse = PREFIX) -> SequenceId: ...

    def fork(self, sequence: SequenceId) -> SequenceId: ...

    def close(self, sequence: SequenceId) -> int:
        """Returns the fall of slots in use."""
        ...

    def length(self, sequence: SequenceId) -> int: ...

    def num_pending(self, sequence: SequenceId, end: int | None = None) -> int:
        """Of the entries in front of `end`, or of all."""
        ...

    def exact_upto(self, sequence: SequenceId) -> int: ...

    def ids(self, sequence: SequenceId, start: int = 0, end: int | None = None) -> list[int]: ...

    def append(self, sequence: SequenceId, ids: Sequence[int]) -> None:
        """New entries at the end, pending. Computes nothing."""

    def truncate(self, sequence: SequenceId, length: int) -> None:
        """Drops entries from the end."""

    def splice(self, sequence: SequenceId, edits: Sequence[RowEdit], dry_run: bool = False) -> list[RowReceipt]:
        """Disjoint edits as one change; receipts in the order given. Computes nothing."""
        ...

    def undo(self, sequence: SequenceId, edit_id: str, at: int, inserted: int) -> Restored:
        """The kept entries of an edit take the place of [at, at + inserted)."""
        ...

    def checkpoint(self, sequence: SequenceId) -> SequenceId:
        """Remembers a sequence's list and what it could undo, for `rollback`. Ends with `rollback` or `discard`."""
        ...

    def rollback(self, sequence: SequenceId, checkpoint: SequenceId) -> None:
        """The sequence is as it was at the checkpoint; rows that had to be evicted since are pending."""

    def discard(self, checkpoint: SequenceId) -> None: ...

    def check_queue(self) -> None:
        """Raises QUEUE_FULL when `compute` and `generate` would."""

    def compute(self, sequence: SequenceId, listener: Listener) -> Request:
        """Queues the computation of all pending entries. Raises POOL_EXCEEDED, QUEUE_FULL."""
        ...

    def generate(self, sequence: SequenceId, params: GenerateParams, listener: Listener) -> Request:
        """Queues a Generate on a sequence that is not empty. Raises POOL_EXCEEDED, QUEUE_FULL."""
        ...

    def step(self) -> bool:
        """Admits, computes one packed step, tells listeners. False when there was nothing to do."""
        ...

    def stats(self) -> EngineStats: ...

    def check_integrity(self) -> None:
        """Asserts the engine's invariants."""
