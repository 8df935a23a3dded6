"""What the server says of its work and of itself, as frozen values. Counts are tokens, times milliseconds.

Owns no behaviour and knows no wire messages: `wire` converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leyline_sdk.mode import Mode


@dataclass(frozen=True, slots=True)
class Usage:
    """What one Generate took.

    Attributes:
        context: tokens in the session when the call began to run.
        computed: of those, the rows (one a token) that were computed before the first token.
        reused: of those, the rows that were there already.
        generated: tokens said.
        ttft_ms: from when the session took the call (after the wait for a busy one) to the first token, or 0.
        total_ms: from then to the end of the call.
        queued_ms: of those, until it began to run: the wait for slots, or for a place among the running.
    """

    context: int
    computed: int
    reused: int
    generated: int
    ttft_ms: float
    total_ms: float
    queued_ms: float


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why the cache hit or broke, in one call that computes. prefix_hit + content_hit + kept + computed = tokens of the
    session.

    Attributes:
        prefix_hit: tokens whose KV came from the prefix tree in this call.
        content_hit: tokens whose KV came from equal content elsewhere, in this call: `Reuse.CONTENT` alone.
        kept: tokens that had KV already.
        turned: tokens read at another position than where they were written.
        computed: tokens whose KV was computed.
        first_divergence: index of the first token that had to be computed; None: there was none.
        reason: why something was computed. "APPEND": only what is new; "EDIT": R, or what a FORGET left to compute;
            "EVICTED": the session had lost its slots; "COLD": the session's first computation.
        content_spans: which tokens those of `content_hit` are: disjoint ranges [start, end) of the session, ascending.
            Hits that touch are one range; a repair by share leaves many short ones.
    """

    prefix_hit: int
    content_hit: int
    kept: int
    turned: int
    computed: int
    first_divergence: int | None
    reason: str
    content_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Warmed:
    """What `session.warm` did with one document. computed + reused = num_tokens.

    Attributes:
        num_tokens: of the document; less than 32 can't be found by their content.
        computed: of those, the rows (one a token) that were computed now; the last one always is.
        reused: of those, the rows that were there already.
    """

    num_tokens: int
    computed: int
    reused: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one edit did, or would do.

    Of several edits in one call each has its own receipt. `at`, `kept`, `turned`, `to_compute` and `exact_upto` are of
    the session as it is after all of them.

    Attributes:
        edit_id: for `undo` and `forget`; empty for a dry run.
        mode: the mode it was made in.
        at: token index where R stands now.
        removed: tokens that went.
        inserted: tokens of R.
        shift: tokens by which what follows moved: inserted - removed.
        kept: tokens after the span whose KV stays.
        turned: of those, the ones that stand elsewhere than where they were written.
        to_compute: tokens that the next call computes, in the whole session and not for this edit alone: with what
            was pending before, and equal in all receipts of one call.
        freed: slots (one a token) by which those in use by any session fell: 0 where a fork still holds them. A
            FORGET's are also those of what follows it; of several FORGETs, the first counts these.
        exact_upto: token index below which the KV equals an honest prefill's.
        influence_remains: whether kept KV was computed from the removed text.
        held_elsewhere: FORGET: ids of your other sessions that still hold some of its rows.
        removed_message_ids: messages that are no longer in the session.
        label: the edit's label: a policy's name, or what you gave.
        repaired: tokens after the span that have KV and are computed again, counted in `to_compute`; those of a
            `share` are counted in `kept` too, until they are chosen.
    """

    edit_id: str
    mode: Mode
    at: int
    removed: int
    inserted: int
    shift: int
    kept: int
    turned: int
    to_compute: int
    freed: int
    exact_upto: int
    influence_remains: bool
    held_elsewhere: tuple[str, ...]
    removed_message_ids: tuple[str, ...]
    label: str
    repaired: int = 0


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """An edit that was made, by a policy or by hand, on whose behalf and to what.

    Attributes:
        policy: its name; empty for an edit by hand.
        message_ids: the messages that it changed or removed.
        receipt: what it did. `edit_id`, `removed` and `inserted` are the receipt's.
    """

    policy: str
    message_ids: tuple[str, ...]
    receipt: Receipt

    @property
    def edit_id(self) -> str:
        return self.receipt.edit_id

    @property
    def removed(self) -> int:
        return self.receipt.removed

    @property
    def inserted(self) -> int:
        return self.receipt.inserted


# ---------------------------------------------------------------- the server


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's bounds. Tokens where nothing else is said.

    Attributes:
        max_context: in one session.
        num_slots: rows of the pool, one a token.
        max_replacement: in one R.
        max_directives: edits in one call.
        max_sessions: sessions at once, of all tenants.
        max_queue: requests that may wait to run, and calls that may wait for one session.
        max_id_bytes: bytes of a session, request, message or tool-call id.
        max_message_bytes: bytes of one gRPC message.
        sink_tokens: AMORTIZE in front of this index needs `allow_sink`.
        max_stop_strings: stop strings of one Generate.
    """

    max_context: int
    num_slots: int
    max_replacement: int
    max_directives: int
    max_sessions: int
    max_queue: int
    max_id_bytes: int
    max_message_bytes: int
    sink_tokens: int
    max_stop_strings: int


@dataclass(frozen=True, slots=True)
class Feature:
    """Whether the server supports something.

    Attributes:
        name: "AMORTIZE", "FORGET", "TOOLS", "REASONING", ..
        supported: whether it does.
        reason: why not; empty when it does.
    """

    name: str
    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The server's pool and its work, of all tenants. num_slots = free + in_use + cached.

    Attributes:
        num_slots: rows of the pool, one a token.
        free: slots that hold nothing.
        in_use: slots that at least one session holds.
        cached: slots that only prefix or content hits or an undo would use: they go before anything is refused.
        rows_computed: rows that the model has computed since the server started.
        running: requests that compute now.
        queued: requests that wait to run, for slots or for a place among the running.
    """

    num_slots: int
    free: int
    in_use: int
    cached: int
    rows_computed: int
    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class Canary:
    """A server's self-test of its model at load: whether edits do what they should.

    Attributes:
        passed: whether all is in bounds. If not, AMORTIZE is refused unless the server was told to warn only.
        rotation_error: relative error of keys that are turned by many positions.
        oracle_kl: nats; AMORTIZE against Hugging Face's own attention over the edited cache.
        unedited_kl: nats; the same where nothing was edited. `oracle_kl` may be four times that.
        agreement: share of probes in which AMORTIZE and the unedited session begin alike; None where it was `skipped`.
        probes: how many there were.
        threshold: the least agreement.
        failures: what is out of bounds, with figure and bound.
        skipped: why there is no agreement.
    """

    passed: bool
    rotation_error: float
    oracle_kl: float
    unedited_kl: float
    agreement: float | None
    probes: int
    threshold: float
    failures: tuple[str, ...]
    skipped: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, within which bounds, and how the pool stands at this moment.

    Attributes:
        model: as it was named to the server.
        architecture: Hugging Face's model_type.
        dtype: of weights and cache.
        device: where they are.
        vocab_size: token ids are below it.
        rotary_layout: "interleaved", "interleaved_to_halves" or "halves"; empty when keys can't be turned, and
            AMORTIZE is refused.
        chat_format: how messages become tokens.
        server_version: the server's package version.
        limits: its bounds.
        pool: slots and requests.
        features: by name.
        canary: what its self-test at load found; None where it made none.
    """

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    rotary_layout: str
    chat_format: str
    server_version: str
    limits: Limits
    pool: PoolStats
    features: Mapping[str, Feature] = field(default_factory=dict)
    canary: Canary | None = None
