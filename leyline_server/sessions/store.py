"""Which sessions there are, whose they are, and the order of calls on each.

Owns the registry, the memory of answered requests, and the rule that one call at a time works on a session: another
is BUSY, or waits when it asked to. Touched by the engine's thread alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from leyline_proto.conversation import Conversation
from leyline_proto.once import Once, check_id
from leyline_proto.refusal import Refusal
from leyline_proto.reuse import Reuse
from leyline_server.engine.engine import SequenceId
from leyline_server.sessions.session import Serving, Session

Answer = TypeVar("Answer")


class _Mutation(Protocol):
    """A mutating request of the contract."""

    @property
    def request_id(self) -> str: ...

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...


class SessionStore:
    """See the module. `remembered` bounds the request ids whose answers are kept."""

    def __init__(self, serving: Serving, remembered: int) -> None:
        self._serving = serving
        self._sessions: dict[tuple[str, str], Session] = {}
        self._once: Once[Any] = Once(remembered)
        self.closing = False

    # ------------------------------------------------------------ registry

    def add(self, tenant: str, session_id: str, ttl_s: float | None, reuse: Reuse) -> Session:
        """A new, empty session. Raises SESSION_EXISTS, TOO_MANY_SESSIONS."""
        limit = self._serving.limits.max_sessions
        if len(self._sessions) >= limit:
            raise Refusal(
                "TOO_MANY_SESSIONS", f"there are {limit} sessions; that is the limit", limit=limit, retry_after_s=5
            )
        session_id = session_id or f"s-{uuid.uuid4().hex[:12]}"
        if (tenant, session_id) in self._sessions:
            raise Refusal("SESSION_EXISTS", f"session {session_id!r} exists already", session_id=session_id)
        sequence = self._serving.engine.open((tenant, self._serving.model_digest), reuse)
        bound = self._serving.default_ttl_s
        ttl = bound if ttl_s is None else min(ttl_s, bound)
        session = Session(tenant, Conversation(session_id), sequence, reuse, time.monotonic(), ttl)
        self._sessions[tenant, session_id] = session
        return session

    def fork(self, origin: Session, session_id: str) -> Session:
        """A new session over the origin's rows. Raises SESSION_EXISTS, TOO_MANY_SESSIONS."""
        copy = self.add(origin.tenant, session_id, origin.ttl_s, origin.reuse)
        self._serving.engine.close(copy.sequence)
        copy.sequence = self._serving.engine.fork(origin.sequence)
        copy.conversation = replace(origin.conversation, session_id=copy.id)
        return copy

    def find(self, tenant: str, session_id: str) -> Session:
        """Raises SESSION_NOT_FOUND, also for another tenant's session; INVALID_ARGUMENT or TOO_LONG for a bad id."""
        check_id("session_id", session_id, required=True)
        session = self._sessions.get((tenant, session_id))
        if session is None:
            raise Refusal("SESSION_NOT_FOUND", f"no session {session_id!r}", session_id=session_id)
        session.used = time.monotonic()
        return session

    def remove(self, session: Session) -> int:
        """Closes an idle session; returns the fall of slots in use. Calls that waited for it find it gone."""
        del self._sessions[session.tenant, session.id]
        session.closed = True
        session.scrub_streams()
        freed = self._serving.engine.close(session.sequence)
        self.resume_waiting(session)
        return freed

    def of(self, tenant: str) -> list[Session]:
        """The tenant's sessions, by id."""
        return sorted((s for s in self._sessions.values() if s.tenant == tenant), key=lambda s: s.id)

    def names(self, tenant: str) -> dict[SequenceId, str]:
        return {session.sequence: session.id for session in self.of(tenant)}

    def cancel_all(self) -> None:
        """Cancels whatever runs, between the next two steps."""
        for session in self._sessions.values():
            if session.run is not None:
                session.run.cancel()

    def expire(self) -> list[str]:
        """Closes idle sessions whose time is up. Returns their ids."""
        now = time.monotonic()
        old = [s for s in self._sessions.values() if s.run is None and now - s.used > s.ttl_s]
        for session in old:
            self.remove(session)
        return [session.id for session in old]

    # ------------------------------------------------------------ calls

    def once(self, tenant: str, request: _Mutation, answer: Answer, start: Callable[[Answer], None]) -> Answer:
        """The first answer to this request; when there is none, `answer`, which `start` begins to settle.

        A refusal is not remembered, so that a retry tries again.
        """
        if self.closing:
            raise Refusal("SHUTTING_DOWN", "the server is shutting down", retry_after_s=5)
        known: Answer | None = self._once.find(tenant, request)
        if known is not None:
            return known
        self._once.record(tenant, request, answer)
        try:
            start(answer)
        except BaseException:
            self._once.drop(tenant, request)
            raise
        return answer

    def forget_answer(self, tenant: str, request: _Mutation) -> None:
        """A call that was taken and refused later: a retry tries again."""
        self._once.drop(tenant, request)

    def when_free(
        self, tenant: str, session_id: str, act: Callable[[Session], None], wait: bool, urgent: bool = False
    ) -> None:
        """Runs `act` on the session now, or, when it is busy and `wait` is set, as soon as it is free; `urgent` before
        others that wait. An `act` that had to wait reports its own refusals, and may find the session closed.

        Raises SESSION_NOT_FOUND, BUSY, QUEUE_FULL.
        """
        session = self.find(tenant, session_id)
        if session.run is None and not session.waiting:
            act(session)
            return
        if not wait:
            raise Refusal(
                "BUSY", f"session {session.id!r} is in the middle of a call", session_id=session.id, retry_after_s=1
            )
        limit = self._serving.limits.max_queue
        if len(session.waiting) >= limit and not urgent:
            raise Refusal(
                "QUEUE_FULL",
                f"{limit} calls wait for session {session.id!r}; that is the limit",
                limit=limit,
                retry_after_s=1,
            )
        if urgent:
            session.waiting.appendleft(lambda: act(session))
        else:
            session.waiting.append(lambda: act(session))

    def resume_waiting(self, session: Session) -> None:
        """Runs calls that waited, until one of them keeps the session busy."""
        while session.waiting and session.run is None:
            session.waiting.popleft()()
