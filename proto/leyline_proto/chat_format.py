"""What the rules need to know of a chat format: how a message becomes tokens, and tokens a message.

Owns the interface and the values that cross it. The server implements it over a real tokenizer, the
SDK's fake over bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from leyline_proto import leyline_pb2 as pb
from leyline_proto.spans import Part


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids with the parts that tile them: `sum(part.length) == len(ids)`."""

    ids: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One generated call, in the order of the tokens. `error` says why it is malformed; empty when it is not."""

    name: str
    arguments_json: str
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """What the tokens after an assistant's role marker say.

    `parts` tile the ids. The calls stand in the order of the CALL parts, whose call_id is still empty. `closed` is
    true when the end marker was there. `half_call` is the length of an unfinished call at the end, in tokens; no
    part covers more than it.
    """

    text: str
    reasoning: str
    parts: tuple[Part, ...]
    calls: tuple[ParsedCall, ...]
    closed: bool
    half_call: int = 0


class ChatFormat(Protocol):
    """Renders only what is new: no method ever sees the history's text again."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an assistant's message."""
        ...

    def render(self, message: pb.Message, call_ids: Sequence[str], tools: Sequence[pb.Tool], first: bool) -> Rendered:
        """A whole, closed message. `call_ids` are the ids of its tool calls; `tools` are given with the session's
        system message, `first` with the first message. Raises NOT_SUPPORTED for what the format can't say."""
        ...

    def open_assistant(self, first: bool) -> Rendered:
        """The marker after which the model speaks."""
        ...

    def close_assistant(self, parts: Sequence[Part] = ()) -> Rendered:
        """The end of an assistant's message whose body has these parts: what still has to close, and the end marker."""
        ...

    def parse(self, ids: Sequence[int]) -> ParsedBody:
        """Reads an assistant's body. Works on ids: text that spells a marker is text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, in which nothing is special. Raises INVALID_ARGUMENT for lone surrogates and NUL."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that form no character become U+FFFD."""
        ...

    def lead(self, role: pb.Role.ValueType) -> str:
        """What stands in front of a text in its TEXT part without being shown as part of it; mostly nothing."""
        ...
