"""Requests in few words, and waiting for something that the server does by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from leyline_proto import leyline_pb2 as pb
from tests.contract.scene import fresh, message
from tests.service.running import RunningServer, tiny_tokenizer

PATIENCE_S = 30.0


def until(true: Callable[[], object], what: str) -> None:
    """Polls. Fails after half a minute, naming what did not come."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text)


class Talk:
    """One session over raw requests: every field under the test's control."""

    def __init__(self, server: RunningServer, *messages: pb.Message, ids: Sequence[int] = (), key: str = "") -> None:
        self.server, self.key, self.id = server, key, fresh("talk")
        self.call(pb.CreateSessionRequest(request_id=fresh(), session_id=self.id, messages=messages))
        if ids:
            self.append(ids=ids)

    def call(self, request: Any) -> Any:
        return self.server.call(request, self.key)

    @property
    def state(self) -> pb.SessionState:
        return self.server.state(self.id, self.key)

    # ------------------------------------------------------------ requests

    def appending(self, *messages: pb.Message, ids: Sequence[int] = (), **fields: Any) -> pb.AppendRequest:
        request = pb.AppendRequest(**{"request_id": fresh(), "session_id": self.id, **fields})
        if ids:
            request.token_ids.ids.extend(ids)
        elif messages:
            request.messages.messages.extend(messages)
        return request

    def editing(self, *directives: pb.Directive, **fields: Any) -> pb.ApplyDirectivesRequest:
        return pb.ApplyDirectivesRequest(
            **{"request_id": fresh(), "session_id": self.id, "directives": directives, **fields}
        )

    def generating(self, max_tokens: int = 4, **fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(**{"request_id": fresh(), "session_id": self.id, "max_tokens": max_tokens, **fields})

    # ------------------------------------------------------------ calls

    def append(self, *messages: pb.Message, ids: Sequence[int] = (), **fields: Any) -> pb.AppendResponse:
        answer: pb.AppendResponse = self.call(self.appending(*messages, ids=ids, **fields))
        return answer

    def prefill(self) -> pb.CacheReport:
        report: pb.CacheReport = self.call(self.editing(prefill=True)).cache
        return report

    def edit(self, *directives: pb.Directive, **fields: Any) -> pb.ApplyDirectivesResponse:
        answer: pb.ApplyDirectivesResponse = self.call(self.editing(*directives, **fields))
        return answer

    def stream(self, max_tokens: int = 4, **fields: Any) -> Any:
        return self.server.stream(self.generating(max_tokens, **fields), self.key)

    def generate(self, max_tokens: int = 4, **fields: Any) -> pb.GenerateDone:
        *_, last = self.stream(max_tokens, **fields)
        done: pb.GenerateDone = last.done
        return done

    def close(self) -> int:
        return int(self.call(pb.CloseSessionRequest(request_id=fresh(), session_id=self.id)).freed)


def span(start: int, end: int, **fields: Any) -> pb.Directive:
    return pb.Directive(span=pb.Span(start=start, end=end), **fields)


def user(content: str, message_id: str = "") -> pb.Message:
    return message("user", content, message_id=message_id)


def ids_of(events: Sequence[pb.GenerateResponse]) -> list[int]:
    """The generated tokens of a stream."""
    return [token for event in events for token in event.delta.token_ids]


def text_of(events: Sequence[pb.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events)


def cancelled(talk: Talk) -> bool:
    """Whether the server has heard that the running or queued request is to stop."""
    engine = talk.server.parts.engine
    requests = talk.server.on_engine(lambda: [*engine._admission.running, *engine._admission.queue])
    return any(request.cancelled for request in requests)
