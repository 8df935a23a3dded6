"""Reuse in the SDK: what a session asks for, what a resumed one has, and documents that are warmed ahead."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Mode, Repair, Reuse, Warmed, clear, errors
from leyline_sdk.testing import FakeServer, FakeTransport
from leyline_sdk.wire import cache_from_pb

DOCUMENTS = ["the first document, " * 4, "and the second one, " * 5]
READ = {"name": "read", "parameters": {"type": "object"}}


class Watching(FakeTransport):
    """Keeps the requests, and fails those that `fails` names: before they arrive, or `after` they have acted."""

    def __init__(self, fake: FakeServer) -> None:
        super().__init__(fake)
        self.requests: list[Any] = []
        self.fails: dict[str, errors.APIError] = {}
        self.after = False

    def unary(self, method: str, request: Any, *args: Any) -> Any:
        self.requests.append(request)
        if method in self.fails and not self.after:
            raise self.fails[method]
        answer = super().unary(method, request, *args)
        if method in self.fails:
            raise self.fails[method]
        return answer

    def of(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]


# ---------------------------------------------------------------- asking for it


@pytest.mark.parametrize("reuse", [None, *Reuse])
def test_a_session_says_what_it_reuses(reuse: Reuse | None) -> None:
    with FakeServer().client() as client:
        session = client.session("s", reuse=reuse)
        assert session.reuse is (reuse or Reuse.PREFIX)
        assert session.info().reuse is session.reuse
        assert session.fork().reuse is session.reuse
        assert client.session("s").reuse is session.reuse


def test_async() -> None:
    async def run() -> None:
        async with FakeServer().async_client() as client:
            session = await client.session(
                "s", reuse=Reuse.CONTENT, reuse_repair=Repair(first=4), reuse_least_share=0.5
            )
            with pytest.raises(errors.ConfigError, match=r"reuse_least_share 0\.5, not 0\.75"):
                await client.session("s", reuse_least_share=0.75)
            assert session.reuse is (await client.session("s")).reuse is Reuse.CONTENT
            assert (await session.fork()).reuse is Reuse.CONTENT
            (warmed,) = await session.warm(DOCUMENTS[0])
            assert warmed.num_tokens == len(DOCUMENTS[0])
            with pytest.raises(errors.ConfigError, match="reuse_repair"):
                await client.session(reuse_repair=Repair(first=4))

    asyncio.run(run())


def test_the_repair_is_sent() -> None:
    watching = Watching(FakeServer())
    client = FakeServer().client(transport=watching)
    client.session(reuse=Reuse.CONTENT, reuse_repair=Repair(first=16))
    client.session(reuse=Reuse.CONTENT, reuse_repair=Repair(share=0.25))
    client.session(reuse=Reuse.CONTENT)
    first, share, none = (request for request in watching.of(pb.CreateSessionRequest))
    assert first.reuse == pb.REUSE_CONTENT
    assert (first.reuse_repair.first, share.reuse_repair.share) == (16, 0.25)
    assert not none.HasField("reuse_repair")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"reuse": "content"}, "PREFIX, REGISTER, CONTENT"),
        ({"reuse": 3}, "PREFIX, REGISTER, CONTENT"),
        ({"reuse": Reuse.CONTENT, "reuse_repair": 16}, "no Repair"),
        ({"reuse": Reuse.REGISTER, "reuse_repair": Repair(first=16)}, "content hits"),
        ({"reuse": Reuse.REGISTER, "reuse_least_share": 0.5}, "content hits"),
        ({"reuse": Reuse.CONTENT, "reuse_least_share": 2}, "reuse_least_share=2 is no number in"),
        ({"reuse": Reuse.CONTENT, "reuse_least_share": "all"}, "is no number in"),
        ({"reuse": Reuse.CONTENT, "reuse_least_share": True}, "is no number in"),
    ],
)
def test_bad_values_are_refused_before_any_call(bad: dict[str, Any], says: str) -> None:
    fake = FakeServer()
    with pytest.raises(errors.ConfigError, match=says):
        fake.client().session("s", **bad)
    assert fake.calls == []


def test_a_repair_alone_is_for_a_session_that_is_resumed() -> None:
    fake = FakeServer()
    with pytest.raises(errors.ConfigError, match="content hits"):
        fake.client().session(reuse_repair=Repair(share=0.5))
    assert fake.calls == []
    with pytest.raises(errors.ConfigError, match="content hits"):
        fake.client().session("new", reuse_repair=Repair(share=0.5))
    assert "CreateSession" not in fake.calls
    fake.client().session("old", reuse=Reuse.CONTENT, reuse_repair=Repair(share=0.5))
    assert fake.client().session("old", reuse_repair=Repair(share=0.5)).reuse is Reuse.CONTENT


def test_a_model_that_cant_turn_keys_refuses_to_take() -> None:
    client = FakeServer(amortize_refused="no turning").client()
    with pytest.raises(errors.NotSupported, match="content reuse"):
        client.session(reuse=Reuse.CONTENT)
    with pytest.raises(errors.NotSupported, match="content reuse"):
        client.session(reuse=Reuse.REGISTER)
    assert client.session(reuse=Reuse.PREFIX).reuse is Reuse.PREFIX


def test_a_resumed_session_has_its_own() -> None:
    client = FakeServer().client()
    client.session("s", reuse=Reuse.CONTENT, reuse_repair=Repair(first=4))
    for other in (Reuse.PREFIX, Reuse.REGISTER):
        with pytest.raises(errors.ConfigError, match=f"CONTENT, not {other}"):
            client.session("s", reuse=other)
    for same in ({}, {"reuse": Reuse.CONTENT}, {"reuse": Reuse.CONTENT, "reuse_repair": Repair(first=4)}):
        assert client.session("s", **cast(Any, same)).reuse is Reuse.CONTENT
    with pytest.raises(errors.ConfigError, match=r"another reuse_repair than Repair\(first=5"):
        client.session("s", reuse=Reuse.CONTENT, reuse_repair=Repair(first=5))
    client.session("least", reuse=Reuse.CONTENT, reuse_least_share=0.5)
    client.session("least", reuse_least_share=0.5)
    with pytest.raises(errors.ConfigError, match=r"with reuse_least_share 0.5, not 0.25"):
        client.session("least", reuse_least_share=0.25)
    client.session("none", reuse=Reuse.CONTENT, reuse_repair=Repair(first=0))
    client.session("none", reuse=Reuse.CONTENT, reuse_repair=Repair(first=0))
    client.session("plain")
    with pytest.raises(errors.ConfigError, match="PREFIX, not CONTENT"):
        client.session("plain", reuse=Reuse.CONTENT)


def test_spans_of_a_report() -> None:
    report = cache_from_pb(
        pb.CacheReport(
            content_hit=50,
            reason=pb.CacheReport.REASON_COLD,
            content_spans=[{"start": 9, "end": 49}, {"start": 60, "end": 70}],
        )
    )
    assert report.content_spans == ((9, 49), (60, 70))
    assert cache_from_pb(pb.CacheReport(reason=pb.CacheReport.REASON_COLD)).content_spans == ()


# ---------------------------------------------------------------- warming


def session_of(**settings: Any) -> tuple[FakeServer, Watching, Any]:
    fake = FakeServer()
    watching = Watching(fake)
    session = fake.client(transport=watching).session("s", **settings)
    watching.requests.clear()
    return fake, watching, session


@pytest.mark.parametrize("reuse", list(Reuse))
def test_warm_computes_each_document_behind_the_sessions_header(reuse: Reuse) -> None:
    fake, watching, session = session_of(tools=[READ], system="be brief", messages=["a question"], reuse=reuse)
    before, transcript = fake.sessions["", "s"].state, session.transcript
    assert session.warm(DOCUMENTS) == tuple(Warmed(len(text), len(text), 0) for text in DOCUMENTS)
    creates, appends = watching.of(pb.CreateSessionRequest), watching.of(pb.AppendRequest)
    assert [append.text for append in appends] == DOCUMENTS
    for create, append in zip(creates, appends, strict=True):
        assert create.reuse == pb.REUSE_REGISTER
        assert [tool.name for tool in create.tools] == ["read"]
        assert [(message.role, message.content) for message in create.messages] == [(pb.ROLE_SYSTEM, "be brief")]
        assert append.session_id == create.session_id
        assert append.prefill
    assert list(fake.sessions) == [("", "s")]
    assert fake.sessions["", "s"].state is before
    assert session.transcript is transcript


def test_warm_takes_one_document_or_none() -> None:
    fake, _, session = session_of()
    assert [warmed.num_tokens for warmed in session.warm(DOCUMENTS[0])] == [len(DOCUMENTS[0])]
    del fake.calls[:]
    assert session.warm([]) == ()
    assert fake.calls == []


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({}, []),
        ({"messages": ["hello"]}, []),
        ({"tools": [READ]}, [""]),  # the tools are listed in front of the first message
        ({"tools": [READ], "messages": ["hello"]}, [""]),
        ({"system": "be brief"}, ["be brief"]),
    ],
)
def test_the_header(settings: dict[str, Any], header: list[str]) -> None:
    fake, watching, session = session_of(**settings)
    session.warm(DOCUMENTS)
    again = fake.client(transport=watching).session("s")
    again.warm(DOCUMENTS)
    again.fork().warm(DOCUMENTS)
    creates = watching.of(pb.CreateSessionRequest)
    assert [[message.content for message in create.messages] for create in creates] == [header] * 6
    assert all(len(create.tools) == len(settings.get("tools", ())) for create in creates)


def test_the_header_is_what_the_system_message_now_says() -> None:
    _, watching, session = session_of(system="be brief")
    session.edit(clear(session.transcript.messages[0], "be exact", mode=Mode.FORGET))
    session.warm(DOCUMENTS[0])
    assert [message.content for message in watching.of(pb.CreateSessionRequest)[0].messages] == ["be exact"]


@pytest.mark.parametrize("bad", ["", [DOCUMENTS[0], ""], [DOCUMENTS[0], 7], 7, [DOCUMENTS[0], "\ud800"]])
def test_a_bad_document_is_refused_before_any_call(bad: Any) -> None:
    fake, _, session = session_of()
    del fake.calls[:]
    with pytest.raises(errors.InvalidArgument):
        session.warm(bad)
    assert fake.calls == []


def test_a_document_that_is_too_long_leaves_nothing_open() -> None:
    fake = FakeServer(max_context=90)
    session = fake.client().session("s")
    with pytest.raises(errors.ContextExceeded):
        session.warm(DOCUMENTS)  # of 80 and 100 tokens
    assert list(fake.sessions) == [("", "s")]
    assert fake.rows_computed == 80


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["CreateSession", "Append"])
def test_a_failure_leaves_nothing_open(method: str, after: bool) -> None:
    fake, watching, session = session_of()
    failure = errors.Internal("broken", status="INTERNAL")
    watching.fails, watching.after = {method: failure}, after
    with pytest.raises(errors.Internal) as caught:
        session.warm(DOCUMENTS)
    assert caught.value is failure
    assert list(fake.sessions) == [("", "s")]
    watching.fails = {}
    assert len(session.warm(DOCUMENTS)) == 2


def test_a_failure_says_what_failed_first() -> None:
    fake, watching, session = session_of()
    failure = errors.Internal("broken", status="INTERNAL")
    watching.fails = {"Append": failure, "CloseSession": errors.Internal("this too", status="INTERNAL")}
    with pytest.raises(errors.Internal) as caught:
        session.warm(DOCUMENTS)
    assert caught.value is failure
    (create,) = watching.of(pb.CreateSessionRequest)
    assert 0 < create.ttl_s <= 60  # what nobody could close expires
    assert len(fake.sessions) == 2


def test_no_room_for_another_session() -> None:
    fake = FakeServer(max_sessions=1)
    session = fake.client().session("s")
    with pytest.raises(errors.TooManySessions):
        session.warm(DOCUMENTS)
    assert list(fake.sessions) == [("", "s")]


def test_warm_while_the_session_speaks() -> None:
    _, _, session = session_of(messages=["hello"])
    with session.generate() as stream:
        assert len(session.warm(DOCUMENTS)) == 2
        assert stream.final().text == "ok"
