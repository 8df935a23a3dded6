"""What an operation on a conversation asks of whoever keeps the token list. Values alone."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ParsedBody
from leyline_proto.directives import Cut
from leyline_proto.spans import MessageEntry


@dataclass(frozen=True, slots=True)
class TailChange:
    """What an append does to the token list: `drop` tokens go from its end, then `ids` come."""

    ids: tuple[int, ...]
    entries: tuple[MessageEntry, ...] = ()
    drop: int = 0


@dataclass(frozen=True, slots=True)
class AppliedCut:
    """A cut in the order in which the token list takes it (right to left, so that no cut moves another)."""

    cut: Cut
    edit_id: str
    index: int  # of the directive in the call
    removed_message_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UndoneEdit:
    """The `inserted` tokens at `at` give way to what the edit had removed."""

    edit_id: str
    at: int
    inserted: int


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    entry: MessageEntry
    body: ParsedBody
    invalid: tuple[pb.InvalidToolCall, ...]
