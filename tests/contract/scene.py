"""A session to be mistreated: system, task, two calls in one turn with their results, an answer, a last question.

`refused` sends a bad request and checks what every refusal has to be: typed, with its bound, and without a trace.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from google.protobuf.message import Message as Proto

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk.error_table import BY_REASON
from tests.contract.sides import Side

_numbers = count(1)


def fresh(prefix: str = "rq") -> str:
    return f"{prefix}-{next(_numbers)}"


def message(role: str, content: str = "", **fields: Any) -> pb.Message:
    return pb.Message(role=pb.Role.Value(f"ROLE_{role.upper()}"), content=content, **fields)


def call(call_id: str, name: str = "read", arguments_json: str = '{"path":"a"}') -> pb.ToolCall:
    return pb.ToolCall(id=call_id, name=name, arguments_json=arguments_json)


READ = pb.Tool(name="read", description="reads", parameters_json="{}")
MESSAGES = [
    message("system", "be brief", message_id="sys"),
    message("user", "what is in a and b?", message_id="task"),
    message("assistant", "", message_id="asks", tool_calls=[call("ca"), call("cb")]),
    message("tool", "seven 𒀀 eight", message_id="ra", tool_call_id="ca"),
    message("tool", "nine", message_id="rb", tool_call_id="cb"),
    message("assistant", "both are there", message_id="says", reasoning="so"),
    message("user", "and now?", message_id="last"),
]


class Scene:
    def __init__(self, side: Side, messages: list[pb.Message] | None = None, prefill: bool = True) -> None:
        self.side = side
        self.id = fresh("scene")
        messages = MESSAGES if messages is None else messages
        side.call(pb.CreateSessionRequest(request_id=fresh(), session_id=self.id, tools=[READ], messages=messages))
        if messages and prefill:
            side.call(pb.ApplyDirectivesRequest(request_id=fresh(), session_id=self.id, prefill=True))

    def close(self) -> None:
        with suppress(errors.SessionNotFound):
            self.side.call(pb.CloseSessionRequest(request_id=fresh(), session_id=self.id))

    # ------------------------------------------------------------ requests

    def append(self, *messages: pb.Message, **fields: Any) -> pb.AppendRequest:
        request = pb.AppendRequest(**{"request_id": fresh(), "session_id": self.id, **fields})
        if messages:
            request.messages.messages.extend(messages)
        return request

    def append_ids(self, ids: Any, **fields: Any) -> pb.AppendRequest:
        return self.append(token_ids=pb.TokenIds(ids=ids), **fields)

    def edit(self, *directives: pb.Directive, **fields: Any) -> pb.ApplyDirectivesRequest:
        return pb.ApplyDirectivesRequest(
            **{"request_id": fresh(), "session_id": self.id, "directives": directives, **fields}
        )

    def generate(self, **fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(**{"request_id": fresh(), "session_id": self.id, "max_tokens": 4, **fields})

    def undo(self, edit_id: str, **fields: Any) -> pb.UndoRequest:
        return pb.UndoRequest(**{"request_id": fresh(), "session_id": self.id, "edit_id": edit_id, **fields})

    def fork(self, **fields: Any) -> pb.ForkSessionRequest:
        return pb.ForkSessionRequest(**{"request_id": fresh(), "session_id": self.id, **fields})

    # ------------------------------------------------------------ where things are

    @property
    def state(self) -> pb.SessionState:
        return self.side.state(self.id)

    def span(self, message_id: str) -> pb.MessageSpan:
        return next(m for m in self.state.messages if m.message_id == message_id)

    def part(self, message_id: str, kind: str) -> tuple[int, int]:
        """[start, end) of the message's first part of this kind."""
        part = next(p for p in self.span(message_id).parts if pb.PartKind.Name(p.kind) == f"PART_KIND_{kind}")
        return part.start, part.end

    # ------------------------------------------------------------ what is checked

    def refused(self, request: Proto, reason: str, **metadata: Any) -> errors.APIError:
        """The request raises this reason's class with this metadata, and nothing is different afterwards."""
        before, in_use = self._seen()
        with pytest.raises(errors.APIError) as caught:
            self.side.send(request)
        error = caught.value
        assert (type(error), error.reason) == (BY_REASON[reason], reason), error.message
        assert not isinstance(error, errors.Internal)
        got = {key: error.metadata.get(key) for key in metadata}
        assert got == {key: str(value) for key, value in metadata.items()}, (error.message, error.metadata)
        assert error.request_id == (getattr(request, "request_id", "") or None)
        after, in_use_after = self._seen()
        assert after == before
        assert in_use_after == in_use
        return error

    def _seen(self) -> tuple[pb.SessionState | None, int]:
        try:
            state: pb.SessionState | None = self.state
        except errors.SessionNotFound:
            state = None
        return state, self.side.slots_in_use()
