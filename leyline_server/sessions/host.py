"""One method for each verb of the contract: checks, then the conversation and the engine together, then the answer.

Every method runs on the engine's thread and returns at once: a Future, or for Generate an EventStream; the same
request_id gives the same object again. The order of checks is the fake's too: authentication (the service's),
request_id, fields, session, busy, version and length, directives, rules of the conversation, bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from leyline_proto import leyline_pb2 as pb
from leyline_proto import validate
from leyline_proto.changes import TailChange
from leyline_proto.conversation import Conversation
from leyline_proto.refusal import Refusal, check_current
from leyline_server.sessions import editing
from leyline_server.sessions.generation import GenerateRun, open_turn
from leyline_server.sessions.prefill import PrefillRun
from leyline_server.sessions.session import Serving, Session
from leyline_server.sessions.store import SessionStore
from leyline_server.sessions.stream import EventStream
from leyline_server.sessions.transaction import Transaction

_PAGE_SIZE = 100
_Answer = TypeVar("_Answer")
_Prefilled = TypeVar("_Prefilled", pb.AppendResponse, pb.ApplyDirectivesResponse)


class Host:
    def __init__(self, serving: Serving, store: SessionStore) -> None:
        self._serving = serving
        self._store = store

    # ------------------------------------------------------------ sessions

    def create(self, tenant: str, request: pb.CreateSessionRequest) -> Future[pb.CreateSessionResponse]:
        serving = self._serving

        def start(future: Future[pb.CreateSessionResponse]) -> None:
            validate.check_create(request, serving.limits, serving.format)
            reuse = serving.reuse(request)
            conversation, change = Conversation("", tuple(request.tools)), TailChange(())
            if request.messages:
                conversation, change = conversation.append(request.messages, serving.format)
                validate.check_appended(len(change.ids), serving.limits)
            session = self._store.add(tenant, request.session_id, _given(request, "ttl_s"), reuse)
            session.conversation = replace(conversation, session_id=session.id)
            serving.engine.append(session.sequence, change.ids)
            future.set_result(pb.CreateSessionResponse(session=editing.state(serving, session)))

        return self._store.once(tenant, request, Future(), start)

    def get(self, tenant: str, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
        session = self._store.find(tenant, request.session_id)
        out = editing.state(self._serving, session)
        if request.include_tokens:
            out.token_ids.extend(self._serving.engine.ids(session.sequence, 0, out.num_tokens))
        if request.include_content:
            for span in out.messages:
                editing.fill_content(self._serving, session, span)
        return pb.GetSessionResponse(session=out)

    def list(self, tenant: str, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
        validate.check_list(request)
        size = request.page_size or _PAGE_SIZE
        later = [s for s in self._store.of(tenant) if s.id > request.page_token]
        now = time.monotonic()
        page = [
            pb.SessionSummary(
                session_id=session.id,
                version=session.conversation.version,
                num_tokens=len(session.conversation.table),
                num_pending=self._serving.engine.num_pending(session.sequence, len(session.conversation.table)),
                idle_s=now - session.used,
                busy=session.run is not None,
            )
            for session in later[:size]
        ]
        return pb.ListSessionsResponse(sessions=page, next_page_token=page[-1].session_id if len(later) > size else "")

    def close(self, tenant: str, request: pb.CloseSessionRequest) -> Future[pb.CloseSessionResponse]:
        """Cancels what runs in the session, then closes it, before any call that waits for it."""

        def act(session: Session, future: Future[pb.CloseSessionResponse]) -> None:
            future.set_result(pb.CloseSessionResponse(freed=self._store.remove(session)))

        def cancel(session: Session) -> None:
            if session.run is not None:
                session.run.cancel()

        return self._on_session(tenant, request, act, wait=True, busy=cancel)

    def fork(self, tenant: str, request: pb.ForkSessionRequest) -> Future[pb.ForkSessionResponse]:
        def act(session: Session, future: Future[pb.ForkSessionResponse]) -> None:
            _check_current(session, request)
            copy = self._store.fork(session, request.new_session_id)
            future.set_result(pb.ForkSessionResponse(session=editing.state(self._serving, copy)))

        return self._on_session(tenant, request, act, lambda: validate.check_fork(request))

    # ------------------------------------------------------------ append and edit

    def append(self, tenant: str, request: pb.AppendRequest) -> Future[pb.AppendResponse]:
        serving = self._serving

        def act(session: Session, future: Future[pb.AppendResponse]) -> None:
            _check_current(session, request)
            planned = editing.plan(serving, session, request.directives)
            after, change = self._appended(planned.after, request)
            validate.check_appended(len(change.ids), serving.limits)
            self._check_prefill(len(after.table), request.prefill)
            undo = Transaction(serving, session) if request.prefill else None
            edited = editing.carry_out(serving, session, planned, lambda: self._store.names(tenant))
            length = serving.engine.length(session.sequence) - change.drop
            dropped = serving.engine.ids(session.sequence, length)
            serving.engine.truncate(session.sequence, length)
            serving.engine.append(session.sequence, change.ids)
            session.conversation = after
            response = pb.AppendResponse(
                version=after.version,
                num_tokens=len(after.table),
                messages=after.spans({entry.id for entry in change.entries}),
                receipts=edited.receipts,
                edited=edited.messages,
                dropped_half_call=serving.format.decode(dropped),
            )
            self._settle(tenant, request, session, future, response, undo)

        def check() -> None:
            validate.check_append(request, serving.limits, serving.format)

        return self._on_session(tenant, request, act, check, request.wait)

    def apply(self, tenant: str, request: pb.ApplyDirectivesRequest) -> Future[pb.ApplyDirectivesResponse]:
        serving = self._serving

        def act(session: Session, future: Future[pb.ApplyDirectivesResponse]) -> None:
            begun = time.perf_counter()
            _check_current(session, request)
            planned = editing.plan(serving, session, request.directives)
            self._check_prefill(len(planned.after.table), request.prefill)
            undo = Transaction(serving, session) if request.prefill else None
            edited = editing.carry_out(serving, session, planned, lambda: self._store.names(tenant), request.dry_run)
            response = pb.ApplyDirectivesResponse(
                version=planned.after.version,
                num_tokens=len(planned.after.table),
                receipts=edited.receipts,
                edited=edited.messages,
                wall_ms=(time.perf_counter() - begun) * 1e3,
            )
            self._settle(tenant, request, session, future, response, undo)

        def check() -> None:
            validate.check_apply(request, serving.limits)

        return self._on_session(tenant, request, act, check, request.wait, record=not request.dry_run)

    def undo(self, tenant: str, request: pb.UndoRequest) -> Future[pb.UndoResponse]:
        def act(session: Session, future: Future[pb.UndoResponse]) -> None:
            _check_current(session, request)
            future.set_result(editing.undo(self._serving, session, request.edit_id))

        return self._on_session(tenant, request, act, lambda: validate.check_undo(request), request.wait)

    # ------------------------------------------------------------ generate

    def generate(self, tenant: str, request: pb.GenerateRequest) -> EventStream:
        serving = self._serving

        def begin(session: Session, stream: EventStream) -> None:
            if stream.cancelled:
                raise Refusal("CANCELLED", "the call was cancelled while it waited for its session")
            _check_current(session, request)
            planned = editing.plan(serving, session, request.directives)
            opening = open_turn(serving, planned.after, request)
            undo = Transaction(serving, session) if request.directives else None
            edited = editing.carry_out(serving, session, planned, lambda: self._store.names(tenant))

            def ended(error: Refusal | None, kept: bool, told: bool) -> None:
                if undo is not None:
                    undo.keep() if kept else undo.roll_back()
                if error is not None or (not told and not request.directives):
                    self._store.forget_answer(tenant, request)  # nothing was done: a retry does it
                stream.end(error)
                self._store.resume_waiting(session)

            session.streams.add(stream)
            stream.runs(GenerateRun(serving, session, opening, edited, stream, ended).cancel)

        def start(stream: EventStream) -> None:
            validate.check_generate(request, serving.limits, serving.format.vocab_size)
            refused = self._refused(tenant, request, stream.end)
            self._store.when_free(tenant, request.session_id, refused(begin, stream), request.wait)

        return self._store.once(tenant, request, EventStream(), start)

    # ------------------------------------------------------------ shared

    def _on_session(
        self,
        tenant: str,
        request: Any,
        act: Callable[[Session, Future[_Answer]], None],
        check: Callable[[], None] = lambda: None,
        wait: bool = False,
        record: bool = True,
        busy: Callable[[Session], None] | None = None,
    ) -> Future[_Answer]:
        """Answers a unary verb: remembered by its request_id, when the session is free. `busy` is called on a session
        that is not, and puts the call in front of those that wait."""

        def start(future: Future[_Answer]) -> None:
            check()
            if busy is not None:
                busy(self._store.find(tenant, request.session_id))
            refused = self._refused(tenant, request, future.set_exception)
            self._store.when_free(tenant, request.session_id, refused(act, future), wait, busy is not None)

        if record:
            return self._store.once(tenant, request, Future(), start)
        future: Future[_Answer] = Future()
        start(future)
        return future

    def _refused(
        self, tenant: str, request: Any, fail: Callable[[Any], None]
    ) -> Callable[[Callable[[Session, _Answer], None], _Answer], Callable[[Session], None]]:
        """Wraps an act, so that what it raises, now or after a wait, becomes the answer and is not remembered."""

        def wrap(act: Callable[[Session, _Answer], None], answer: _Answer) -> Callable[[Session], None]:
            def run(session: Session) -> None:
                try:
                    if session.closed:
                        self._store.find(tenant, request.session_id)
                    act(session, answer)
                except Exception as error:
                    self._store.forget_answer(tenant, request)
                    fail(error)

            return run

        return wrap

    def _appended(self, conversation: Conversation, request: pb.AppendRequest) -> tuple[Conversation, TailChange]:
        format = self._serving.format
        content = request.WhichOneof("content")
        if content == "messages":
            return conversation.append(request.messages.messages, format)
        ids = format.encode(request.text) if content == "text" else request.token_ids.ids
        return conversation.append_ids(ids, format)

    def _check_prefill(self, num_tokens: int, prefill: bool) -> None:
        if prefill:
            validate.token_budget(num_tokens, 0, self._serving.limits)
            self._serving.engine.check_queue()

    def _settle(
        self,
        tenant: str,
        request: Any,
        session: Session,
        future: Future[_Prefilled],
        response: _Prefilled,
        undo: Transaction | None,
    ) -> None:
        """Answers at once, or, inside a transaction, when what is pending has been computed."""
        if undo is None:
            future.set_result(response)
            return

        def done(outcome: pb.CacheReport | Refusal) -> None:
            if isinstance(outcome, Refusal):
                undo.roll_back()
                self._store.forget_answer(tenant, request)
                future.set_exception(outcome)
            else:
                undo.keep()
                response.cache.CopyFrom(outcome)
                future.set_result(response)
            self._store.resume_waiting(session)

        PrefillRun(self._serving, session, done)


def _given(request: Any, field: str) -> Any:
    """An optional field's value, or None."""
    return getattr(request, field) if request.HasField(field) else None


def _check_current(session: Session, request: Any) -> None:
    fields = request.DESCRIPTOR.fields_by_name
    length = _given(request, "expected_len") if "expected_len" in fields else None
    check_current(
        _given(request, "expected_version"), session.conversation.version, length, len(session.conversation.table)
    )
