"""A session on the server: its conversation, its sequence in the engine, and who is busy with it.

Owns nothing but these references. Touched by the engine's thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakSet

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ChatFormat
from leyline_proto.conversation import Conversation
from leyline_proto.directives import Rules
from leyline_proto.reuse import Reuse, reuse_of
from leyline_server.engine.engine import Engine, SequenceId
from leyline_server.model.chat import StreamDelta
from leyline_server.sessions.stream import EventStream


class BodyReader(Protocol):
    """Turns the ids of one body into text while they come."""

    def push(self, token_id: int) -> StreamDelta: ...

    def flush(self) -> StreamDelta: ...


class ServedFormat(ChatFormat, Protocol):
    """A chat format with what serving needs beyond the rules."""

    @property
    def name(self) -> str: ...

    @property
    def lacking(self) -> dict[str, str]:
        """Features this format can't say, each with the reason."""
        ...

    @property
    def differences(self) -> tuple[str, ...]:
        """Where it parts from the checkpoint's own template."""
        ...

    def content(self, role: pb.Role.ValueType, ids: Sequence[int]) -> str: ...

    def stream(self) -> BodyReader: ...


class Run(Protocol):
    """A compute or generate that keeps a session busy."""

    def cancel(self) -> None: ...


@dataclass(slots=True, eq=False)
class Session:
    tenant: str
    conversation: Conversation
    sequence: SequenceId
    reuse: Reuse
    used: float  # time.monotonic of the last call
    ttl_s: float
    run: Run | None = None
    closed: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    streams: WeakSet[EventStream] = field(default_factory=WeakSet)  # of its Generates, as long as they are remembered

    @property
    def id(self) -> str:
        return self.conversation.session_id

    def ended_run(self) -> None:
        """The session is free again; its time without a call starts now."""
        self.run = None
        self.used = time.monotonic()

    def scrub_streams(self) -> None:
        """No retry replays a text that has to be forgotten."""
        for stream in self.streams:
            stream.scrub()


@dataclass(frozen=True, slots=True)
class Serving:
    """What all sessions share."""

    engine: Engine
    format: ServedFormat
    limits: pb.Limits
    model_digest: str
    default_max_tokens: int
    default_ttl_s: float
    raw_stream: Callable[[], BodyReader]  # reads what has no roles

    def reuse(self, request: pb.CreateSessionRequest) -> Reuse:
        """What a new session reuses. Raises INVALID_ARGUMENT, NOT_SUPPORTED."""
        return reuse_of(request, self.engine.content_reuse_refused, self.engine.repair_share_refused)

    def rules(self, session: Session) -> Rules:
        return Rules(
            self.format,
            self.limits.max_replacement,
            self.limits.max_directives,
            self.limits.sink_tokens,
            lambda start, end: self.engine.ids(session.sequence, start, end),
            self.engine.amortize_refused,
            self.engine.repair_share_refused,
        )
