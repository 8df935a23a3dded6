"""What a client does without a session, as operations without I/O: open, list, tokenise, ask about the server."""

from __future__ import annotations

import json
from collections.abc import Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import reports as r
from leyline_sdk import types as t
from leyline_sdk.calls import Op, ask, new_request_id
from leyline_sdk.core import OnEdit, SessionCore
from leyline_sdk.errors import ConfigError, SessionNotFound
from leyline_sdk.mode import Repair
from leyline_sdk.planning import with_pins
from leyline_sdk.policy import Policy, check_policies
from leyline_sdk.reuse import Reuse, check_reuse
from leyline_sdk.transcript import Transcript
from leyline_sdk.wire import (
    appended_from_pb,
    building,
    messages_to_pb,
    repair_to_pb,
    reuse_from_pb,
    reuse_to_pb,
    server_info_from_pb,
    summary_from_pb,
    tool_to_pb,
    transcript_from_pb,
)

_PAGE = 200


class Service:
    """Remembers the server's limits, which don't change while it runs."""

    def __init__(self) -> None:
        self._limits: r.Limits | None = None

    def server_info(self) -> Op[r.ServerInfo]:
        got = yield from ask(pb.GetServerInfoRequest(), pb.GetServerInfoResponse)
        info = server_info_from_pb(got)
        self._limits = info.limits
        return info

    def open_session(
        self,
        session_id: str | None,
        *,
        tools: Sequence[t.ToolLike],
        system: str | None,
        messages: t.MessageLike | Sequence[t.MessageLike],
        policies: Sequence[Policy],
        on_edit: OnEdit | None,
        ttl_s: float | None,
        create: bool = True,
        reuse: Reuse | None = None,
        reuse_repair: Repair | None = None,
        reuse_least_share: float | None = None,
    ) -> Op[SessionCore]:
        """Resumes the session of this id, or creates one.

        Raises ConfigError when a resumed one has other tools or another reuse; without `create`, SessionNotFound.
        """
        if not create and not session_id:
            raise ConfigError("create=False resumes a session: it needs the session's id")
        check_policies(policies)
        check_reuse(reuse if session_id else reuse or Reuse.PREFIX, reuse_repair, reuse_least_share)
        wanted = [tool_to_pb(tool) for tool in tools]
        first = [{"role": "system", "content": system}] if system is not None else []
        sent = messages_to_pb(first) + messages_to_pb(messages)
        limits = self._limits or (yield from self.server_info()).limits
        state = (yield from _resume(session_id, wanted, create)) if session_id else None
        created = state is None
        if state is None:
            check_reuse(reuse or Reuse.PREFIX, reuse_repair, reuse_least_share)
            with building():
                request = pb.CreateSessionRequest(
                    request_id=new_request_id(),
                    session_id=session_id or "",
                    tools=wanted,
                    messages=sent,
                    ttl_s=ttl_s,
                    reuse=reuse_to_pb(reuse or Reuse.PREFIX),
                    reuse_repair=repair_to_pb(reuse_repair) if reuse_repair is not None else None,
                    reuse_least_share=reuse_least_share or 0,
                )
            state = (yield from ask(request, pb.CreateSessionResponse)).session
            transcript = Transcript().placed(
                appended_from_pb(state.messages, sent), version=state.version, turn=state.turn
            )
        else:
            _check_same_reuse(state, reuse, reuse_repair, reuse_least_share)
            transcript = with_pins(transcript_from_pb(state))
        known = reuse_from_pb(state.reuse)
        return SessionCore(state.session_id, transcript, limits, policies, on_edit, created, state.tools, known)

    def sessions(self) -> Op[list[t.SessionSummary]]:
        """All pages."""
        out: list[t.SessionSummary] = []
        token = ""
        while True:
            request = pb.ListSessionsRequest(page_size=_PAGE, page_token=token)
            got = yield from ask(request, pb.ListSessionsResponse)
            out.extend(map(summary_from_pb, got.sessions))
            token = got.next_page_token
            if not token:
                return out

    def tokenize(self, text: str) -> Op[list[int]]:
        with building():
            request = pb.TokenizeRequest(text=text)
        return list((yield from ask(request, pb.TokenizeResponse)).ids)

    def detokenize(self, token_ids: Sequence[int]) -> Op[str]:
        with building():
            request = pb.DetokenizeRequest(ids=token_ids)
        return (yield from ask(request, pb.DetokenizeResponse)).text


def _resume(session_id: str, wanted: Sequence[pb.Tool], create: bool) -> Op[pb.SessionState | None]:
    """A session that exists, with its content; None when one has to be created."""
    try:
        got = yield from ask(pb.GetSessionRequest(session_id=session_id, include_content=True), pb.GetSessionResponse)
    except SessionNotFound:
        if not create:
            raise
        return None
    if wanted and _signatures(wanted) != _signatures(got.session.tools):
        raise ConfigError(
            f"session {session_id!r} was created with other tools: {[tool.name for tool in got.session.tools]}, "
            f"not {[tool.name for tool in wanted]}; resume it without tools, or use another id"
        )
    return got.session


def _check_same_reuse(
    state: pb.SessionState, reuse: Reuse | None, repair: Repair | None, least_share: float | None
) -> None:
    """Raises ConfigError where a session that is resumed has another; None: not asked for."""
    has = reuse_from_pb(state.reuse)
    if reuse is not None and reuse != has:
        raise ConfigError(
            f"session {state.session_id!r} was created with reuse {has}, not {reuse}; resume it without, or use "
            "another id"
        )
    # A repair of nothing is not told.
    if repair is not None and state.reuse_repair != (repair_to_pb(repair) if repair.first != 0 else pb.Repair()):
        raise ConfigError(
            f"session {state.session_id!r} was created with another reuse_repair than {repair}; resume it without, or "
            "use another id"
        )
    if least_share not in (None, state.reuse_least_share):
        raise ConfigError(
            f"session {state.session_id!r} was created with reuse_least_share {state.reuse_least_share:g}, not "
            f"{least_share:g}; resume it without, or use another id"
        )


def _signatures(tools: Sequence[pb.Tool]) -> list[tuple[str, str, object]]:
    return [(tool.name, tool.description, json.loads(tool.parameters_json or "{}")) for tool in tools]
