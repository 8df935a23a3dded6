"""What calls return, as frozen values. Counts are tokens, times milliseconds, ranges [start, end).

Owns no behaviour and knows no wire messages: `wire` converts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from leyline_sdk.mode import Mode

MessageLike = str | Mapping[str, Any]
"""A user message as text, or an OpenAI-style dict: role, content, tool_calls, tool_call_id, id, reasoning."""

ToolLike = Mapping[str, Any]
"""An OpenAI-style tool, with or without its {"type": "function", "function": ..} wrapping."""


class FinishReason(StrEnum):
    """Why a Generate ended."""

    STOP = "STOP"
    TOOL_CALLS = "TOOL_CALLS"
    LENGTH = "LENGTH"
    STOP_STRING = "STOP_STRING"
    CANCELLED = "CANCELLED"
    UNSPECIFIED = "UNSPECIFIED"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, with its arguments parsed."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A generated call that is malformed or names no tool. It may be answered and need not be."""

    id: str
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class Usage:
    context: int
    """Tokens in the session when the call was admitted."""
    computed: int
    """Rows (one a token) computed before the first token."""
    reused: int
    """Rows of the context that were there already."""
    generated: int
    """Tokens said."""
    ttft_ms: float
    """Milliseconds from admission to the first token."""
    total_ms: float
    """Milliseconds of the whole call."""
    queued_ms: float
    """Milliseconds of waiting for slots."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why the cache hit or broke. prefix_hit + content_hit + kept + computed = entries of the session."""

    prefix_hit: int
    """Tokens whose KV came from the prefix tree in this call."""
    content_hit: int
    """Tokens whose KV came from equal content elsewhere."""
    kept: int
    """Tokens that had KV already."""
    turned: int
    """Tokens read at another position than where they were written."""
    computed: int
    """Tokens whose KV was computed."""
    first_divergence: int | None
    """Index of the first token that had to be computed; None: there was none."""
    reason: str
    """Why something was computed: "APPEND", "EDIT", "EVICTED" or "COLD"."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one edit did."""

    edit_id: str
    """For `undo` and `forget`; empty for a dry run."""
    mode: Mode
    """The mode it was made in."""
    at: int
    """Token index where R stands now."""
    removed: int
    """Tokens that went."""
    inserted: int
    """Tokens of R."""
    shift: int
    """Tokens by which what follows moved: inserted - removed."""
    kept: int
    """Tokens after the span whose KV stays."""
    turned: int
    """Of those, the ones that stand elsewhere than where they were written."""
    to_compute: int
    """Tokens of the session that wait for KV after this edit."""
    freed: int
    """Slots (one a token) by which the pool's use fell."""
    exact_upto: int
    """Token index below which the KV equals an honest prefill's."""
    influence_remains: bool
    """Whether kept KV was computed from the removed text."""
    held_elsewhere: tuple[str, ...]
    """FORGET: ids of your other sessions that still hold some of its rows."""
    removed_message_ids: tuple[str, ...]
    """Messages that are no longer in the session."""
    label: str
    """The edit's label: a policy's name, or what you gave."""
    repaired: int = 0
    """Tokens after the span that have KV and are computed again; of a `share`, counted among `kept` until then."""


@dataclass(frozen=True, slots=True)
class AppliedEdit:
    """An edit that was made, by a policy or by hand, on whose behalf and to what."""

    policy: str
    """Its name; empty for an edit by hand."""
    message_ids: tuple[str, ...]
    """The messages that it changed or removed."""
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


@dataclass(frozen=True, slots=True)
class Reply:
    """What a Generate said. `applied_edits` are all edits since the last reply."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    invalid_tool_calls: tuple[InvalidToolCall, ...]
    finish_reason: FinishReason
    applied_edits: tuple[AppliedEdit, ...]
    usage: Usage
    cache: CacheReport
    message_id: str
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream: whole characters, and the ids they came from."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did. `message_ids` in the order of the session, `num_tokens` of the whole session."""

    message_ids: tuple[str, ...]
    num_tokens: int
    applied_edits: tuple[AppliedEdit, ...]
    cache: CacheReport | None  # with prefill
    dropped_half_call: str  # a cut-short message was closed, and this text of a half call was dropped


@dataclass(frozen=True, slots=True)
class EditResult:
    """What `edit`, `preview` and `prefill` did or would do."""

    version: int
    num_tokens: int
    applied_edits: tuple[AppliedEdit, ...]
    cache: CacheReport | None = None
    wall_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class UndoResult:
    version: int
    num_tokens: int
    restored: int
    restored_with_kv: int
    exact_upto: int


@dataclass(frozen=True, slots=True)
class EditInfo:
    """An entry of the session's edit log."""

    edit_id: str
    mode: Mode
    version: int
    at: int
    removed: int
    inserted: int
    undone: bool
    undoable: bool


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as the server sees it."""

    id: str
    version: int
    num_tokens: int
    num_pending: int
    exact_upto: int
    turn: int
    busy: bool
    unanswered_call_ids: tuple[str, ...]
    edits: tuple[EditInfo, ...]
    token_ids: tuple[int, ...] = ()  # only when asked for


@dataclass(frozen=True, slots=True)
class SessionSummary:
    id: str
    version: int
    num_tokens: int
    num_pending: int
    idle_s: float
    busy: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's bounds. Tokens where nothing else is said."""

    max_context: int
    num_slots: int  # rows of the pool
    max_replacement: int
    max_directives: int  # in one call
    max_sessions: int
    max_queue: int  # requests
    max_id_bytes: int
    max_message_bytes: int
    sink_tokens: int
    max_stop_strings: int


@dataclass(frozen=True, slots=True)
class Feature:
    """Whether the server supports something, and why not."""

    name: str
    supported: bool
    reason: str


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The server's pool, in slots, and its work: rows computed since it started, requests running and waiting."""

    num_slots: int
    free: int
    in_use: int
    cached: int
    rows_computed: int
    running: int
    queued: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
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
