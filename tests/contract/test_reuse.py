"""What a session may ask to reuse, and where that shows: the server and the fake answer alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk.testing import FakeServer
from tests.contract.scene import READ, Scene, fresh, message
from tests.contract.sides import Side, fake_side, real_side
from tests.service.running import RunningServer

TAKES: dict[str, Any] = {"reuse": pb.REUSE_CONTENT}
ALL = [pb.REUSE_PREFIX, pb.REUSE_REGISTER, pb.REUSE_CONTENT]

Create = Callable[..., pb.SessionState]


@pytest.fixture
def create(side: Side) -> Iterator[Create]:
    made: list[str] = []

    def create(**fields: Any) -> pb.SessionState:
        request = pb.CreateSessionRequest(**{"request_id": fresh(), "session_id": fresh("reuse"), **fields})
        state: pb.SessionState = side.call(request).session
        made.append(state.session_id)
        return state

    yield create
    for session_id in made:
        side.call(pb.CloseSessionRequest(request_id=fresh(), session_id=session_id))


@pytest.mark.parametrize("reuse", [pb.REUSE_UNSPECIFIED, *ALL], ids=pb.Reuse.Name)
def test_a_session_tells_what_it_reuses(side: Side, create: Create, reuse: pb.Reuse.ValueType) -> None:
    state = create(reuse=reuse, messages=[message("user", "hello")])
    expected = reuse or pb.REUSE_PREFIX
    assert state.reuse == expected
    assert side.state(state.session_id).reuse == expected
    side.generate(pb.GenerateRequest(request_id=fresh(), session_id=state.session_id, max_tokens=2))
    assert side.state(state.session_id).reuse == expected


@pytest.mark.parametrize("reuse", ALL, ids=pb.Reuse.Name)
def test_a_fork_has_its_sessions(side: Side, create: Create, reuse: pb.Reuse.ValueType) -> None:
    origin = create(reuse=reuse)
    fork = side.call(pb.ForkSessionRequest(request_id=fresh(), session_id=origin.session_id)).session
    assert fork.reuse == reuse
    assert side.state(fork.session_id).reuse == reuse
    side.call(pb.CloseSessionRequest(request_id=fresh(), session_id=fork.session_id))


@pytest.mark.parametrize(
    "repair", [{"first": 0}, {"first": 16}, {"first": 2**31 - 1}, {"share": 0.001}, {"share": 1.0}], ids=str
)
def test_a_repair_of_what_it_takes(create: Create, repair: dict[str, Any]) -> None:
    state = create(**TAKES, reuse_repair=pb.Repair(**repair))
    assert state.reuse == pb.REUSE_CONTENT
    assert state.HasField("reuse_repair") is (repair != {"first": 0})
    if state.HasField("reuse_repair"):
        assert state.reuse_repair == pb.Repair(**repair)


@pytest.mark.parametrize("least", [0.0, 0.75, 1.0])
def test_the_least_share_of_what_it_takes(side: Side, create: Create, least: float) -> None:
    state = create(**TAKES, reuse_least_share=least)
    assert state.reuse_least_share == side.state(state.session_id).reuse_least_share == least


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an unknown reuse": ({"reuse": 9}, {"field": "reuse", "value": 9}),
    "a negative one": ({"reuse": -1}, {"field": "reuse", "value": -1}),
    "a repair of nothing": ({"reuse_repair": pb.Repair(first=1)}, {"field": "reuse_repair"}),
    "a repair of exact rows": (
        {"reuse": pb.REUSE_REGISTER, "reuse_repair": pb.Repair(first=1)},
        {"field": "reuse_repair"},
    ),
    "no amount": ({**TAKES, "reuse_repair": pb.Repair()}, {"field": "reuse_repair"}),
    "less than nothing": (
        {**TAKES, "reuse_repair": pb.Repair(first=-1)},
        {"field": "reuse_repair.first", "value": -1},
    ),
    "no share": ({**TAKES, "reuse_repair": pb.Repair(share=0)}, {"field": "reuse_repair.share"}),
    "more than all": ({**TAKES, "reuse_repair": pb.Repair(share=1.5)}, {"field": "reuse_repair.share", "value": 1.5}),
    "a share that is no number": (
        {**TAKES, "reuse_repair": pb.Repair(share=float("nan"))},
        {"field": "reuse_repair.share"},
    ),
    "a least share of nothing": ({"reuse_least_share": 0.5}, {"field": "reuse_least_share"}),
    "a least share of exact rows": (
        {"reuse": pb.REUSE_REGISTER, "reuse_least_share": 0.5},
        {"field": "reuse_least_share"},
    ),
    "a least share below 0": ({**TAKES, "reuse_least_share": -0.1}, {"field": "reuse_least_share", "value": -0.1}),
    "a least share above 1": ({**TAKES, "reuse_least_share": 1.5}, {"field": "reuse_least_share", "value": 1.5}),
    "a least share that is no number": ({**TAKES, "reuse_least_share": float("nan")}, {"field": "reuse_least_share"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_asked_for(scene: Scene, name: str) -> None:
    fields, metadata = REFUSED[name]
    before = len(scene.side.call(pb.ListSessionsRequest()).sessions)
    scene.refused(pb.CreateSessionRequest(request_id=fresh(), **fields), "INVALID_ARGUMENT", **metadata)
    assert len(scene.side.call(pb.ListSessionsRequest()).sessions) == before


def test_another_reuse_is_another_request(side: Side, create: Create) -> None:
    used = fresh()
    create(request_id=used, session_id="one-and-only", reuse=pb.REUSE_REGISTER)
    again = pb.CreateSessionRequest(request_id=used, session_id="one-and-only", reuse=pb.REUSE_CONTENT)
    Scene(side, [], prefill=False).refused(again, "REQUEST_ID_REUSED", request_id=used)


def test_a_session_that_reuses_is_a_session_like_others(side: Side, create: Create) -> None:
    """The same calls, answered in the same form, whatever was found."""
    state = create(**TAKES, reuse_repair=pb.Repair(first=2), tools=[READ], messages=[message("system", "be brief")])
    for _ in range(2):
        append = pb.AppendRequest(request_id=fresh(), session_id=state.session_id, prefill=True)
        append.messages.messages.append(message("user", "the same text, which is long enough to be found " * 2))
        report = side.call(append).cache
        assert report.content_hit == sum(span.end - span.start for span in report.content_spans)
        total = report.prefix_hit + report.content_hit + report.kept + report.computed
        assert total == side.state(state.session_id).num_tokens


@pytest.fixture
def sides_that_cant(real_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    """Neither model can turn keys."""
    monkeypatch.setattr(real_server.parts.engine, "amortize_refused", "its keys don't turn")
    return [fake_side(FakeServer(amortize_refused="its keys don't turn")), real_side(real_server)]


def test_a_model_that_cant_turn_keys(sides_that_cant: list[Side]) -> None:
    for side in sides_that_cant:
        with pytest.raises(errors.NotSupported) as caught:
            side.call(pb.CreateSessionRequest(request_id=fresh(), **TAKES))
        assert (caught.value.metadata["feature"], caught.value.metadata["why"]) == (
            "CONTENT_REUSE",
            "its keys don't turn",
        )
        with pytest.raises(errors.NotSupported):
            side.call(pb.CreateSessionRequest(request_id=fresh(), reuse=pb.REUSE_REGISTER))
        state = side.call(pb.CreateSessionRequest(request_id=fresh(), reuse=pb.REUSE_PREFIX)).session
        side.call(pb.CloseSessionRequest(request_id=fresh(), session_id=state.session_id))
