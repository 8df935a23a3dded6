"""The fake's rpcs. Each checks fields, session, busy, version and length, directives, the conversation's rules and
the bounds, in this order, as the real server does; then it commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_proto import validate
from leyline_proto.changes import AppliedCut
from leyline_proto.conversation import Conversation
from leyline_proto.directives import check_vocabulary
from leyline_proto.refusal import Refusal, check_current, check_length
from leyline_proto.reuse import reuse_of
from leyline_sdk.testing import fake_session as fs
from leyline_sdk.testing import rows as kv
from leyline_sdk.testing.fake_session import FakeSession, State
from leyline_sdk.testing.generating import Generating
from leyline_sdk.wire import transcript_from_pb

if TYPE_CHECKING:
    from leyline_sdk.testing.server import FakeServer

_PAGE: Final = 50
_FEATURES: Final = {
    "AMORTIZE": "",
    "FORGET": "",
    "CONTENT_REUSE": "",
    "REPAIR_SHARE": "",
    "TOOLS": "",
    "REASONING": "",
    "CONSTRAINED_OUTPUT": "sampling has no grammar",
}


def get_server_info(server: FakeServer, tenant: str, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
    in_use = len(set[int]().union(*(kv.slots(session.state.rows) for session in server.sessions.values())))
    total = server.limits.num_slots
    reasons = {**_FEATURES, "AMORTIZE": server.amortize_refused, "CONTENT_REUSE": server.amortize_refused}
    return pb.GetServerInfoResponse(
        model=pb.ModelInfo(
            name="fake", architecture="fake", vocab_size=server.format.vocab_size, chat_format="bytes", device="none"
        ),
        limits=server.limits,
        supports=[pb.Support(feature=name, supported=not why, reason=why) for name, why in reasons.items()],
        server_version="fake",
        pool=pb.PoolStats(num_slots=total, free=total - in_use, in_use=in_use, rows_computed=server.rows_computed),
    )


def create_session(server: FakeServer, tenant: str, request: pb.CreateSessionRequest) -> pb.CreateSessionResponse:
    validate.check_create(request, server.limits, server.format)
    reuse = reuse_of(request, server.amortize_refused, "")
    session_id = server.new_id(tenant, request.session_id)
    conversation, rows = Conversation(session_id, tuple(request.tools)), kv.Rows()
    if request.messages:
        conversation, change = conversation.append(request.messages, server.format)
        validate.check_appended(len(change.ids), server.limits)
        rows = kv.pending(change.ids)
    session = FakeSession(State(conversation, rows), time.monotonic(), reuse)
    server.sessions[tenant, session_id] = session
    return pb.CreateSessionResponse(session=fs.described(session, server.format))


def get_session(server: FakeServer, tenant: str, request: pb.GetSessionRequest) -> pb.GetSessionResponse:
    session = server.find(tenant, request.session_id)
    return pb.GetSessionResponse(
        session=fs.described(session, server.format, token_ids=request.include_tokens, content=request.include_content)
    )


def list_sessions(server: FakeServer, tenant: str, request: pb.ListSessionsRequest) -> pb.ListSessionsResponse:
    validate.check_list(request)
    if request.page_token and not request.page_token.isdigit():
        raise Refusal("INVALID_ARGUMENT", "the page_token is not one of this server's", field="page_token")
    mine = sorted((key[1], session) for key, session in server.sessions.items() if key[0] == tenant)
    start = int(request.page_token or 0)
    end = start + (request.page_size or _PAGE)
    return pb.ListSessionsResponse(
        sessions=[
            pb.SessionSummary(
                session_id=session_id,
                version=session.state.conversation.version,
                num_tokens=len(session.state.rows),
                num_pending=kv.num_pending(session.state.rows),
                idle_s=time.monotonic() - session.idle_since,
                busy=session.busy,
            )
            for session_id, session in mine[start:end]
        ],
        next_page_token=str(end) if end < len(mine) else "",
    )


def close_session(server: FakeServer, tenant: str, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
    session = server.find(tenant, request.session_id)
    if session.running is not None:
        session.running.cancel()
    in_use = server.world(tenant, session).in_use
    del server.sessions[tenant, request.session_id]
    return pb.CloseSessionResponse(freed=in_use(kv.slots(session.state.rows)) - in_use(set()))


def fork_session(server: FakeServer, tenant: str, request: pb.ForkSessionRequest) -> pb.ForkSessionResponse:
    validate.check_fork(request)
    session = server.find(tenant, request.session_id, wait=False)
    _check_current(request, session)
    session_id = server.new_id(tenant, request.new_session_id)
    conversation = replace(session.state.conversation, session_id=session_id)
    child = FakeSession(replace(session.state, conversation=conversation), time.monotonic(), session.reuse)
    server.sessions[tenant, session_id] = child
    return pb.ForkSessionResponse(session=fs.described(child, server.format))


def append(server: FakeServer, tenant: str, request: pb.AppendRequest) -> pb.AppendResponse:
    validate.check_append(request, server.limits, server.format)
    session = server.find(tenant, request.session_id, request.wait)
    _check_current(request, session)
    state, receipts, applied = fs.edit(session.state, request.directives, server.world(tenant, session))
    if request.WhichOneof("content") == "messages":
        conversation, change = state.conversation.append(request.messages.messages, server.format)
    else:
        ids = request.token_ids.ids or server.format.encode(request.text)
        conversation, change = state.conversation.append_ids(ids, server.format)
    validate.check_appended(len(change.ids), server.limits)
    keep = len(state.rows) - change.drop
    dropped = kv.tokens(state.rows[keep:])
    state = replace(state, conversation=conversation, rows=(*state.rows[:keep], *kv.pending(change.ids)))
    report = None
    if request.prefill:
        validate.token_budget(len(state.rows), 0, server.limits)
        state, report = fs.computed(state)
        server.rows_computed += report.computed
    session.state = state
    return pb.AppendResponse(
        version=conversation.version,
        num_tokens=len(state.rows),
        messages=conversation.spans({entry.id for entry in change.entries}),
        receipts=receipts,
        cache=report,
        edited=_edited(server, state, applied),
        dropped_half_call=server.format.decode(dropped),
    )


def apply_directives(server: FakeServer, tenant: str, request: pb.ApplyDirectivesRequest) -> pb.ApplyDirectivesResponse:
    validate.check_apply(request, server.limits)
    session = server.find(tenant, request.session_id, request.wait)
    _check_current(request, session)
    state, receipts, applied = fs.edit(session.state, request.directives, server.world(tenant, session))
    report = None
    if request.prefill:
        validate.token_budget(len(state.rows), 0, server.limits)
        state, report = fs.computed(state)
        server.rows_computed += report.computed
    for receipt in receipts if request.dry_run else ():
        receipt.edit_id = ""
    if not request.dry_run:
        session.state = state
    return pb.ApplyDirectivesResponse(
        version=state.conversation.version,
        num_tokens=len(state.rows),
        receipts=receipts,
        cache=report,
        edited=_edited(server, state, applied),
    )


def undo(server: FakeServer, tenant: str, request: pb.UndoRequest) -> pb.UndoResponse:
    validate.check_undo(request)
    session = server.find(tenant, request.session_id, request.wait)
    _check_current(request, session)
    session.state, answer = fs.undone(session.state, request.edit_id)
    answer.session.CopyFrom(fs.described(session, server.format))
    return answer


def tokenize(server: FakeServer, tenant: str, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(ids=server.format.encode(request.text))


def detokenize(server: FakeServer, tenant: str, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    check_length("the call", len(request.ids), server.limits.max_context)
    check_vocabulary(request.ids, server.format.vocab_size)
    return pb.DetokenizeResponse(text=server.format.decode(request.ids))


def admit(server: FakeServer, tenant: str, request: pb.GenerateRequest) -> Generating:
    """Everything up to the first token; the rest happens as the answer is read."""
    validate.check_generate(request, server.limits, server.format.vocab_size)
    session = server.find(tenant, request.session_id, request.wait)
    _check_current(request, session)
    state, receipts, applied = fs.edit(session.state, request.directives, server.world(tenant, session))
    before = state.conversation
    conversation, marker = before.begin_turn(server.format, request.raw)
    state = replace(state, conversation=conversation, rows=(*state.rows, *kv.pending(marker)))
    wanted = request.max_tokens if request.HasField("max_tokens") else None
    budget = validate.token_budget(len(state.rows), wanted, server.limits)

    def messages() -> list[dict[str, Any]]:
        described = fs.described(FakeSession(state), server.format, content=True)
        return transcript_from_pb(described).to_messages()

    ids = request.force_token_ids or server.script.next_ids(messages, server.format)
    started = pb.GenerateStarted(
        version=conversation.version,
        num_tokens=len(state.rows),
        receipts=receipts,
        edited=_edited(server, state, applied),
    )
    session.state, report = fs.computed(state, again_from=len(state.rows) - 1)
    server.rows_computed += report.computed

    def finish(said: list[int], reason: pb.FinishReason.ValueType, stop: str) -> pb.GenerateDone:
        server.once.record(tenant, request, running.events)
        if not said:
            return _nothing_said(session, before, reason)
        return _finished(server, session, said, reason, stop, report)

    body = kv.tokens(state.rows[conversation.body_start(server.format) :])
    running = session.running = Generating(started, ids, budget, request, finish, body)
    return running


def _finished(
    server: FakeServer,
    session: FakeSession,
    said: list[int],
    reason: pb.FinishReason.ValueType,
    stop: str,
    report: pb.CacheReport,
) -> pb.GenerateDone:
    """The session takes what was said; its last token has no KV yet."""
    state, format = session.state, server.format
    rows = (*state.rows, *kv.pending(said))
    rows = (*kv.computed(rows[:-1]), *rows[-1:]) if said else rows
    server.rows_computed += max(0, len(said) - 1)
    body = kv.tokens(rows[state.conversation.body_start(format) :])
    conversation, turn = state.conversation.end_turn(format, body)
    session.state = replace(state, conversation=conversation, rows=rows)
    (span,) = conversation.spans({turn.entry.id})
    span.text = turn.body.text.removesuffix(stop)
    span.reasoning = turn.body.reasoning
    if reason == pb.FINISH_REASON_STOP and turn.entry.calls:
        reason = pb.FINISH_REASON_TOOL_CALLS
    context = len(rows) - len(said)
    usage = pb.Usage(context=context, computed=report.computed, reused=report.kept, generated=len(said))
    return pb.GenerateDone(
        finish_reason=reason,
        message=span,
        invalid_tool_calls=turn.invalid,
        usage=usage,
        cache=report,
        version=conversation.version,
        num_tokens=len(rows),
        turn=conversation.turn,
        stop_string=stop,
    )


def _nothing_said(session: FakeSession, before: Conversation, reason: pb.FinishReason.ValueType) -> pb.GenerateDone:
    """Cancelled before the first token: no message was begun and no turn went by."""
    keep = len(before.table)
    session.state = replace(session.state, conversation=before, rows=session.state.rows[:keep])
    return pb.GenerateDone(finish_reason=reason, version=before.version, num_tokens=keep, turn=before.turn)


def _edited(server: FakeServer, state: State, applied: Iterable[AppliedCut]) -> list[pb.MessageSpan]:
    return [fs.with_text(span, state, server.format) for span in state.conversation.edited(list(applied))]


def _check_current(request: Any, session: FakeSession) -> None:
    def expected(field: str) -> int | None:
        known = field in request.DESCRIPTOR.fields_by_name
        return getattr(request, field) if known and request.HasField(field) else None

    state = session.state
    check_current(expected("expected_version"), state.conversation.version, expected("expected_len"), len(state.rows))


VERBS: Final[dict[str, Callable[[FakeServer, str, Any], Proto]]] = {
    "GetServerInfo": get_server_info,
    "CreateSession": create_session,
    "GetSession": get_session,
    "ListSessions": list_sessions,
    "CloseSession": close_session,
    "ForkSession": fork_session,
    "Append": append,
    "ApplyDirectives": apply_directives,
    "Undo": undo,
    "Tokenize": tokenize,
    "Detokenize": detokenize,
}
