"""What calls take and return, as frozen values. Counts are tokens, times milliseconds, ranges [start, end).

Owns no behaviour and knows no wire messages: `wire` converts. `reports` has what they say of the server's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leyline_sdk.mode import Mode
from leyline_sdk.reports import AppliedEdit, CacheReport, Usage
from leyline_sdk.reuse import Reuse

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
    """One call of a tool.

    Attributes:
        id: what its result names.
        name: of the tool.
        arguments: parsed.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A generated call that is malformed or names no tool. It may be answered and need not be.

    Attributes:
        id: what a result would name.
        text: what was generated between the call's delimiters.
        error: what is wrong with it.
    """

    id: str
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a Generate said.

    Attributes:
        text: the message's text, without the stop string that ended it.
        reasoning: what the model thought before it.
        tool_calls: the calls that want a result, in order.
        invalid_tool_calls: calls that are malformed or name no tool.
        finish_reason: why it ended.
        applied_edits: all edits since the last reply, of policies and by hand.
        usage: tokens and times.
        cache: why the cache hit or broke.
        message_id: of the assistant's message; empty when it was cancelled before its first token.
        stop_string: the one that ended it, or empty.
    """

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
    """A piece of a stream.

    Attributes:
        text: whole characters; empty in the middle of one, or of a tool call.
        reasoning: likewise.
        token_ids: the ids that came with this piece.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did.

    Attributes:
        message_ids: of the new messages, in the order of the session: results stand in the order of their calls.
        num_tokens: of the whole session.
        applied_edits: what the policies did in the same call.
        cache: with `prefill`, what was computed; else None.
        dropped_half_call: a message that had been cut short was closed, and this text of a half call was dropped.
    """

    message_ids: tuple[str, ...]
    num_tokens: int
    applied_edits: tuple[AppliedEdit, ...]
    cache: CacheReport | None
    dropped_half_call: str


@dataclass(frozen=True, slots=True)
class EditResult:
    """What `edit`, `preview` and `prefill` did or would do.

    Attributes:
        version: of the session after it; counts calls that edit, and undos.
        num_tokens: of the whole session after it.
        applied_edits: one for each edit, with its receipt.
        cache: with `prefill`, what was computed; else None.
        wall_ms: that the server took for the edits alone: neither the wait for the session nor a prefill that came
            with them is in it.
    """

    version: int
    num_tokens: int
    applied_edits: tuple[AppliedEdit, ...]
    cache: CacheReport | None = None
    wall_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What an undo brought back.

    Attributes:
        version: of the session after it.
        num_tokens: of the whole session after it.
        restored: tokens that came back.
        restored_with_kv: of those, the ones with the KV that they had; the others are pending.
        exact_upto: token index below which the KV equals an honest prefill's.
    """

    version: int
    num_tokens: int
    restored: int
    restored_with_kv: int
    exact_upto: int


@dataclass(frozen=True, slots=True)
class EditInfo:
    """An entry of the session's edit log.

    Attributes:
        edit_id: for `undo` and `forget`.
        mode: the mode it was made in.
        version: of the session that it made.
        at: token index where its R stands now.
        removed: tokens that went.
        inserted: tokens of R.
        undone: whether it was undone.
        undoable: whether `undo` would take it now.
    """

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
    """A session as the server sees it. What a Generate that still runs has said so far is in none of it.

    Attributes:
        id: the session's.
        version: counts calls that edit, and undos.
        num_tokens: of the whole session.
        num_pending: of those, the ones without KV: the next call that computes computes them.
        exact_upto: token index below which the KV equals an honest prefill's.
        turn: Generates finished.
        busy: whether a call computes in it.
        unanswered_call_ids: tool calls that want a result, in order.
        edits: its edit log, oldest first.
        token_ids: all of them, where they were asked for.
        reuse: what it takes from the server's caches, and leaves there.
    """

    id: str
    version: int
    num_tokens: int
    num_pending: int
    exact_upto: int
    turn: int
    busy: bool
    unanswered_call_ids: tuple[str, ...]
    edits: tuple[EditInfo, ...]
    token_ids: tuple[int, ...] = ()
    reuse: Reuse = Reuse.PREFIX


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session of a list.

    Attributes:
        id: the session's.
        version: counts calls that edit, and undos.
        num_tokens: of the whole session.
        num_pending: of those, the ones without KV.
        idle_s: seconds since its last call.
        busy: whether a call computes in it.
    """

    id: str
    version: int
    num_tokens: int
    num_pending: int
    idle_s: float
    busy: bool
