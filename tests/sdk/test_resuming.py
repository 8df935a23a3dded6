"""What a session object finds when it comes back: a session that is gone, a stream that was left, an undo."""

from __future__ import annotations

import asyncio

import pytest

from leyline_policies import KeepLast
from leyline_sdk import errors
from leyline_sdk.testing import FakeServer, Say, call


def test_created_or_resumed_or_neither() -> None:
    client = FakeServer().client()
    with pytest.raises(errors.SessionNotFound):
        client.session("s", create=False)
    with pytest.raises(errors.ConfigError, match="id"):
        client.session(create=False)
    assert client.session("s").created
    assert not client.session("s").created
    assert not client.session("s", create=False).created
    assert client.session().created
    client.session("s").close()
    with pytest.raises(errors.SessionNotFound):
        client.session("s", create=False)


def test_created_or_resumed_async() -> None:
    async def run() -> None:
        client = FakeServer().async_client()
        with pytest.raises(errors.SessionNotFound):
            await client.session("s", create=False)
        assert (await client.session("s")).created
        async with client.session("s", create=False) as session:
            assert not session.created
            assert session.unanswered == []

    asyncio.run(run())


def test_calls_of_a_stream_that_was_left_are_seen() -> None:
    fake = FakeServer([Say("let me look", tool_calls=(call("read", n=1), call("read", n=2)))])
    session = fake.client().session("s", messages=["go on"])
    with session.generate() as stream:
        while not any(264 in delta.token_ids for delta in stream):  # the end of the first call
            pass
    assert not session.unanswered
    with pytest.raises(errors.UnansweredToolCall) as caught:
        session.append("never mind")
    (unanswered,) = session.unanswered
    assert caught.value.call_ids == [unanswered.id]
    assert session.transcript.messages[-1].open
    session.tool_result(unanswered, "one")
    assert [m.role for m in session.transcript] == ["user", "assistant", "tool"]
    assert not session.unanswered


def test_refresh_after_a_stream_that_was_left() -> None:
    session = FakeServer([Say(tool_calls=(call("read"),)), "done"]).client().session("s", messages=["go on"])
    stream = session.generate()
    for delta in stream:
        if 264 in delta.token_ids:
            break
    session.refresh()
    assert not session.unanswered  # it still runs
    stream.cancel()
    session.refresh()
    session.tool_result(session.unanswered[0], "one")
    assert session.complete().text == "done"


def test_an_undo_survives_a_resume() -> None:
    fake = FakeServer([call("read"), call("read"), "done", "done"])
    session = fake.client().session("s", system="be good", messages=["read both"], policies=[KeepLast(1)])
    for text in ("the first result", "the second result"):
        session.tool_result(session.complete().tool_calls[0], text)
    (edit,) = session.complete().applied_edits
    session.undo(edit.edit_id)
    pinned = session.transcript.pinned
    resumed = fake.client().session("s", policies=[KeepLast(0)])
    assert resumed.transcript.pinned == pinned
    resumed.append("and now?")
    resumed.complete()
    assert [m.text for m in resumed.transcript.of_role("tool")] == ["the first result", "[cleared]"]
    assert resumed.transcript.of_role("tool")[0].undone_ids == (edit.edit_id,)
