"""Sessions, versions, request ids, undo: what is refused around a verb."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from tests.contract.scene import READ, Scene, fresh, message
from tests.contract.sides import BOUNDS, Side

CLEAR = pb.Directive(message=pb.MessageTarget(message_id="rb"), text="x")


def requests(scene: Scene, **fields: Any) -> list[Any]:
    """Every mutating verb on a session."""
    return [
        scene.append(message("user", "x"), **fields),
        scene.edit(CLEAR, **fields),
        scene.undo("e1", **fields),
        scene.generate(**fields),
        scene.fork(**fields),
        pb.CloseSessionRequest(**{"request_id": fresh(), "session_id": scene.id, **fields}),
    ]


@pytest.mark.parametrize(
    ("session_id", "reason"), [("nowhere", "SESSION_NOT_FOUND"), ("", "INVALID_ARGUMENT"), ("x" * 129, "TOO_LONG")]
)
def test_a_session_that_is_not_there(scene: Scene, session_id: str, reason: str) -> None:
    for request in [*requests(scene, session_id=session_id), pb.GetSessionRequest(session_id=session_id)]:
        scene.refused(request, reason)


def test_a_closed_session(side: Side) -> None:
    scene = Scene(side)
    scene.close()
    for request in [*requests(scene), pb.GetSessionRequest(session_id=scene.id)]:
        scene.refused(request, "SESSION_NOT_FOUND", session_id=scene.id)


@pytest.mark.parametrize(
    ("request_id", "reason"), [("", "INVALID_ARGUMENT"), ("x" * 129, "TOO_LONG"), ("é", "INVALID_ARGUMENT")]
)
def test_a_bad_request_id(scene: Scene, request_id: str, reason: str) -> None:
    for request in requests(scene, request_id=request_id):
        scene.refused(request, reason)


def test_a_request_id_with_another_body(scene: Scene) -> None:
    used = fresh()
    scene.side.call(scene.append(message("user", "x"), request_id=used))
    again = [r for r in requests(scene, request_id=used) if not isinstance(r, pb.AppendRequest)]
    for request in [*again, scene.append(message("user", "y"), request_id=used)]:
        error = scene.refused(request, "REQUEST_ID_REUSED", request_id=used)
        assert isinstance(error, errors.AlreadyExists)


def test_a_refused_call_may_be_tried_again(scene: Scene) -> None:
    used = fresh()
    request = scene.append(message("tool", "x", tool_call_id="cx"), request_id=used)
    scene.refused(request, "UNKNOWN_TOOL_CALL")
    scene.refused(request, "UNKNOWN_TOOL_CALL")
    scene.side.call(scene.append(message("user", "x"), request_id=used))  # nothing was done under this id


@pytest.mark.parametrize("expected", [0, 2, 9, -1])
def test_another_version(scene: Scene, expected: int) -> None:
    scene.side.call(scene.edit(CLEAR))
    for request in requests(scene)[:5]:
        request.expected_version = expected
        error = scene.refused(request, "STALE_VERSION", expected=expected, current=1)
        assert isinstance(error, errors.StaleVersion)
        assert error.current == 1


def test_another_length(scene: Scene) -> None:
    length = scene.state.num_tokens
    for request in (scene.append(message("user", "x")), scene.generate()):
        for expected in (0, length - 1, length + 1):
            request.expected_len = expected
            error = scene.refused(request, "STALE_LENGTH", expected=expected, current=length)
            assert isinstance(error, errors.StaleLength)
            assert error.current == length


def test_a_session_in_use(scene: Scene) -> None:
    side = scene.side
    with side.hold():
        stream = side.stream(scene.generate(max_tokens=8, force_token_ids=side.encode("x") * 8))
        next(stream)
        assert scene.state.busy
        for request in requests(scene)[:5]:
            with pytest.raises(errors.SessionBusy) as caught:
                side.send(request)
            assert (caught.value.reason, caught.value.retryable) == ("BUSY", True)
        side.release()
        (*_, last) = stream
    assert last.done.usage.generated == 8
    assert not scene.state.busy


def test_a_call_that_waits_for_a_session_in_use(scene: Scene) -> None:
    side = scene.side
    answers: list[Any] = []
    waiting = scene.append(message("user", "x", message_id="waited"), wait=True)
    with side.hold():
        stream = side.stream(scene.generate(max_tokens=8, force_token_ids=side.encode("x") * 8))
        next(stream)
        thread = threading.Thread(target=lambda: answers.append(side.call(waiting)))
        thread.start()
        side.release()
        thread.join(30)
    (*_, last) = stream
    assert last.done.usage.generated == 8
    # The Generate was cut short by max_tokens, so the append closed its message.
    assert [m.message_id for m in answers[0].messages] == [last.done.message.message_id, "waited"]
    assert scene.state.messages[-1].message_id == "waited"


def test_undo_of_what_cant_come_back(scene: Scene) -> None:
    side = scene.side
    scene.refused(scene.undo("e1"), "UNKNOWN_EDIT", edit_id="e1")
    scene.refused(scene.undo(""), "INVALID_ARGUMENT", field="edit_id")
    scene.refused(scene.undo("x" * 129), "TOO_LONG", limit=128)
    side.call(scene.edit(CLEAR))
    side.call(scene.undo("e1"))
    scene.refused(scene.undo("e1"), "NOT_UNDOABLE", edit_id="e1")
    forget = pb.Directive(message=pb.MessageTarget(message_id="rb"), mode=pb.MODE_FORGET)
    forgotten = side.call(scene.edit(forget)).receipts[0].edit_id
    scene.refused(scene.undo(forgotten), "NOT_UNDOABLE", edit_id=forgotten)
    first = side.call(scene.edit(pb.Directive(message=pb.MessageTarget(message_id="says"), text="one"))).receipts[0]
    side.call(scene.edit(pb.Directive(message=pb.MessageTarget(message_id="says"), text="two")))
    scene.refused(scene.undo(first.edit_id), "NOT_UNDOABLE", edit_id=first.edit_id)
    again = pb.Directive(edit_id="e1", mode=pb.MODE_FORGET)
    scene.refused(scene.edit(again), "INVALID_ARGUMENT", edit_id="e1")  # it was undone: the span is there


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"session_id": "x" * 129}, "TOO_LONG"),
        ({"session_id": "a\nb"}, "INVALID_ARGUMENT"),
        ({"ttl_s": 0.0}, "INVALID_ARGUMENT"),
        ({"ttl_s": -1.0}, "INVALID_ARGUMENT"),
        ({"ttl_s": float("nan")}, "INVALID_ARGUMENT"),
        ({"ttl_s": float("inf")}, "INVALID_ARGUMENT"),
        ({"tools": [pb.Tool(description="no name")]}, "INVALID_ARGUMENT"),
        ({"tools": [READ, READ]}, "INVALID_ARGUMENT"),
        ({"tools": [pb.Tool(name="x", parameters_json="[]")]}, "INVALID_ARGUMENT"),
        ({"tools": [pb.Tool(name="x" * 129)]}, "TOO_LONG"),
        ({"request_id": ""}, "INVALID_ARGUMENT"),
    ],
)
def test_a_session_that_cant_be(scene: Scene, fields: dict[str, Any], reason: str) -> None:
    before = len(scene.side.call(pb.ListSessionsRequest()).sessions)
    scene.refused(pb.CreateSessionRequest(**{"request_id": fresh(), **fields}), reason)
    assert len(scene.side.call(pb.ListSessionsRequest()).sessions) == before


def test_a_taken_session_id(scene: Scene) -> None:
    request = pb.CreateSessionRequest(request_id=fresh(), session_id=scene.id)
    scene.refused(request, "SESSION_EXISTS", session_id=scene.id)
    scene.refused(scene.fork(new_session_id=scene.id), "SESSION_EXISTS", session_id=scene.id)
    scene.refused(scene.fork(new_session_id="x" * 129), "TOO_LONG", limit=128)


def test_too_many_sessions(scene: Scene) -> None:
    side, limit = scene.side, BOUNDS["max_sessions"]
    made: list[str] = []
    while len(side.call(pb.ListSessionsRequest()).sessions) < limit:
        made.append(side.call(pb.CreateSessionRequest(request_id=fresh())).session.session_id)
    error = scene.refused(pb.CreateSessionRequest(request_id=fresh()), "TOO_MANY_SESSIONS", limit=limit)
    assert (error.retryable, error.retry_after_s) == (True, 5)  # one may be closed, or expire
    scene.refused(scene.fork(), "TOO_MANY_SESSIONS", limit=limit)
    for session_id in made:
        side.call(pb.CloseSessionRequest(request_id=fresh(), session_id=session_id))
    assert made


def test_reads_with_bad_fields(scene: Scene) -> None:
    size = scene.side.vocab_size
    for request, reason, metadata in (
        (pb.ListSessionsRequest(page_size=-1), "INVALID_ARGUMENT", {"field": "page_size", "value": -1}),
        (pb.ListSessionsRequest(page_size=1001), "INVALID_ARGUMENT", {"field": "page_size"}),
        (pb.TokenizeRequest(text="\0"), "INVALID_ARGUMENT", {"field": "text"}),
        (pb.DetokenizeRequest(ids=[size]), "TOKEN_OUT_OF_RANGE", {"value": size, "limit": size}),
        (pb.DetokenizeRequest(ids=[65] * 501), "TOO_LONG", {"value": 501, "limit": 500}),
    ):
        scene.refused(request, reason, **metadata)
