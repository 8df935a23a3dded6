"""Sessions against the fake: appends, generates, edits, undo, fork, resume, the mirror."""

from __future__ import annotations

import pytest

from leyline_sdk import FinishReason, Mode, ToolCall, clear, errors, remove, remove_span, replace_content, rerender
from leyline_sdk.edits import Edit, InMessage, cut_content, forget
from leyline_sdk.reports import AppliedEdit
from leyline_sdk.testing import FakeServer, Say, call

READ = {"name": "read", "description": "reads a file", "parameters": {"type": "object"}}


def test_an_agent_loop() -> None:
    fake = FakeServer([Say("let me look", "hm", (call("read", path="a.ini"), call("read", path="b.ini"))), "both: 7"])
    with fake.client().session(tools=[READ], system="You read.") as session:
        session.append("What do they say?")
        reply = session.complete()
        assert (reply.text, reply.reasoning, reply.finish_reason) == ("let me look", "hm", FinishReason.TOOL_CALLS)
        assert [c.name for c in reply.tool_calls] == ["read", "read"]
        assert [dict(c.arguments) for c in reply.tool_calls] == [{"path": "a.ini"}, {"path": "b.ini"}]
        first, second = reply.tool_calls
        session.append_results({second.id: "eight", first.id: "seven"})
        assert [m.text for m in session.transcript.of_role("tool")] == ["seven", "eight"]
        reply = session.complete()
        assert (reply.text, reply.finish_reason) == ("both: 7", FinishReason.STOP)
        assert reply.usage.context + reply.usage.generated == session.transcript.num_tokens
        _same_as_server(session)


def _same_as_server(session) -> None:  # type: ignore[no-untyped-def]
    mirror = session.transcript
    session.refresh()
    assert mirror == session.transcript


def test_messages_in_every_shape() -> None:
    with FakeServer().client().session() as session:
        session.append({"role": "system", "content": "s"})
        session.append(["one", {"role": "user", "content": [{"type": "text", "text": "two"}], "id": "mine"}])
        call_dict = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
        session.append({"role": "assistant", "content": None, "tool_calls": [call_dict], "reasoning": "so"})
        session.tool_result("c1", "done")
        session.append_text("raw text")
        assert [m.role for m in session.transcript] == ["system", "user", "user", "assistant", "tool", "raw"]
        assert session.transcript.messages[3].tool_calls == (ToolCall("c1", "f", {"x": 1}),)
        assert session.transcript.messages[4].to_dict() == {
            "role": "tool",
            "content": "done",
            "id": session.transcript.messages[4].id,
            "tool_call_id": "c1",
            "name": "f",
        }
        assert session.transcript.get("mine") is not None
        _same_as_server(session)
        session.append_ids([104, 105])
        session.refresh()
        assert session.transcript.messages[-1].text == "hi"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": 7},
        {"role": "user", "content": "x", "audio": "y"},
        {"role": "user", "content": "x", "name": "bob"},
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        {"role": "user", "content": "\ud800"},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        7,
    ],
)
def test_a_message_that_cant_be_sent(message) -> None:  # type: ignore[no-untyped-def]
    fake = FakeServer()
    with fake.client().session() as session:
        before = len(fake.calls)
        with pytest.raises(errors.InvalidArgument):
            session.append(message)
        assert len(fake.calls) == before


def test_streams() -> None:
    fake = FakeServer([Say("grüß dich", "hm"), "one\ntwo", "long " * 10])
    with fake.client().session() as session:
        session.append("hi")
        with session.generate() as stream:
            deltas = list(stream)
        assert "".join(d.text for d in deltas) == "grüß dich"
        assert "".join(d.reasoning for d in deltas) == "hm"
        assert stream.final().text == "grüß dich"
        session.append("more")
        with session.generate(stop=["\n", "xx"]) as stream:
            assert "".join(stream.text) == "one"
            assert (stream.final().finish_reason, stream.final().stop_string) == (FinishReason.STOP_STRING, "\n")
        session.append("more")
        reply = session.complete(max_tokens=5)
        assert (reply.text, reply.finish_reason, reply.usage.generated) == ("long ", FinishReason.LENGTH, 5)


def test_leaving_a_stream_early_cancels_it() -> None:
    fake = FakeServer(["abcdef", "more"])
    with fake.client().session() as session:
        session.append("hi")
        with session.generate() as stream:
            assert next(stream.text) == "a"
            with pytest.raises(errors.SessionBusy):
                session.append("too early")
        with pytest.raises(errors.Cancelled):
            stream.final()
        assert list(stream) == []
        assert session.info().turn == 1
        done = session.append("go on")  # what was sent stays, and is closed
        assert session.transcript.messages[-2].text == "a"
        assert not session.transcript.messages[-2].open
        assert done.num_tokens == session.info().num_tokens
        _same_as_server(session)


def test_leaving_before_the_first_token_leaves_no_message() -> None:
    fake = FakeServer(["never", "said"])
    with fake.client().session() as session:
        session.append("hi")
        before = session.transcript
        session.generate().cancel()
        session.refresh()
        assert session.transcript == before
        with session.generate(max_tokens=1) as stream:
            assert stream.final().finish_reason == FinishReason.LENGTH
        _same_as_server(session)


def test_leaving_the_session_cancels_and_detaches() -> None:
    fake = FakeServer(["abc"])
    client = fake.client()
    with client.session("s") as session:
        session.append("hi")
        stream = session.generate()
        next(stream)
    (summary,) = client.sessions()
    assert (summary.id, summary.busy) == ("s", False)
    assert client.session("s").close() > 0
    assert client.sessions() == []


def test_edits_by_hand() -> None:
    seen: list[AppliedEdit] = []
    fake = FakeServer([Say("looking", "why", (call("read", path="a"),)), "fine"])
    with fake.client().session(system="sys", on_edit=seen.append) as session:
        session.append("question")
        wanted = session.complete().tool_calls[0]
        session.tool_result(wanted, "a long result")
        session.complete()
        system, user, assistant, result, answer = session.transcript
        dry = session.edit(clear(wanted, "[x]"), dry_run=True)
        assert dry.applied_edits[0].edit_id == ""
        assert seen == []
        done = session.edit(clear(wanted, "[x]"), replace_content(user, "another question"))
        assert [edit.removed for edit in done.applied_edits] == [13, 8]
        assert [edit.message_ids for edit in seen] == [(result.id,), (user.id,)]
        assert session.transcript.result_of(wanted.id).text == "[x]"  # type: ignore[union-attr]
        _same_as_server(session)
        new = {**assistant.to_dict(), "content": "", "reasoning": ""}
        new["tool_calls"] = [{"id": wanted.id, "type": "function", "function": {"name": "read", "arguments": {}}}]
        session.edit(rerender(assistant, new))
        assert dict(session.transcript.get(assistant.id).tool_calls[0].arguments) == {}  # type: ignore[union-attr]
        _same_as_server(session)
        session.edit(remove(assistant), remove(result), mode_forget(answer))
        assert [m.role for m in session.transcript] == ["system", "user", "assistant"]
        _same_as_server(session)
        assert system.id in {m.id for m in session.transcript}


def mode_forget(message) -> Edit:  # type: ignore[no-untyped-def]
    return Edit(InMessage(message.id), "ok", Mode.FORGET)


def test_spans_and_ranges() -> None:
    with FakeServer().client().session() as session:
        session.append(["first", "second", "third"])
        first, second, third = session.transcript
        session.edit(cut_content(second, 2, 4, "_"))
        session.refresh()
        assert session.transcript.messages[1].text == "se_nd"
        session.edit(remove_span(second.start, second.end - 1 + third.num_tokens, "R"))
        assert [m.role for m in session.transcript] == ["user", "raw"]
        assert session.transcript.messages[1].text == "R"
        _same_as_server(session)
        assert first.text == "first"


def test_undo_brings_back_and_pins() -> None:
    with FakeServer().client().session() as session:
        session.append(["first", "second", "third"])
        before = session.transcript
        done = session.edit(remove(before.messages[1]))
        assert len(session.transcript) == 2
        undone = session.undo(done.applied_edits[0].edit_id)
        assert (undone.version, undone.restored) == (2, before.messages[1].num_tokens)
        assert [m.text for m in session.transcript] == ["first", "second", "third"]
        assert session.transcript.pinned == {before.messages[1].id}
        with pytest.raises(errors.NotUndoable):
            session.undo(done.applied_edits[0].edit_id)
        with pytest.raises(errors.UnknownEdit):
            session.undo("e99")
        edit_id = session.edit(clear("m2")).applied_edits[0].edit_id
        session.edit(forget(edit_id))
        with pytest.raises(errors.NotUndoable):
            session.undo(edit_id)


def test_fork_is_a_session_of_its_own() -> None:
    fake = FakeServer()
    client = fake.client()
    with client.session("a") as session:
        session.append("hi")
        session.complete()
        in_use = client.server_info().pool.in_use
        child = session.fork("b")
        assert client.server_info().pool.in_use == in_use
        child.append("only here")
        assert len(child.transcript) == len(session.transcript) + 1
        _same_as_server(child)
        _same_as_server(session)
        child.close()
        session.close()
        assert client.server_info().pool.in_use == 0


def test_prefill_computes_what_is_pending() -> None:
    with FakeServer().client().session() as session:
        session.append("hello")
        assert session.info().num_pending == session.transcript.num_tokens
        cache = session.prefill().cache
        assert cache is not None
        assert (cache.computed, cache.reason) == (session.transcript.num_tokens, "COLD")
        assert session.info().num_pending == 0
        assert session.info().version == 0
        appended = session.append("more", prefill=True)
        assert appended.cache is not None
        assert appended.cache.kept > 0


def test_resume_by_id() -> None:
    fake = FakeServer(["hello"])
    with fake.client().session("s", tools=[READ], system="sys") as session:
        session.append("hi")
        session.complete()
        edit = session.edit(clear("m3", "[gone]"))
        was = session.transcript
    with fake.client().session("s", tools=[READ]) as resumed:
        assert resumed.transcript == was
        assert resumed.transcript.messages[2].edit_ids == (edit.applied_edits[0].edit_id,)
        resumed.append("again")
    with pytest.raises(errors.ConfigError, match="other tools"):
        fake.client().session("s", tools=[{"name": "write"}])


def test_a_second_writer_is_found_out() -> None:
    fake = FakeServer()
    one = fake.client().session("s")
    one.append("hi")
    two = fake.client().session("s")
    one.append("there")
    with pytest.raises(errors.StaleLength) as stale:
        two.append("me too")
    assert stale.value.current == one.transcript.num_tokens
    one.edit(clear("m2"))
    with pytest.raises(errors.StaleVersion):
        two.edit(clear("m1"))
    two.refresh()
    two.append("now")
    assert two.transcript.messages[-1].text == "now"


def test_tokens() -> None:
    client = FakeServer().client()
    assert client.tokenize("<|end|>") == list(b"<|end|>")
    assert client.detokenize([104, 105]) == "hi"
    with pytest.raises(errors.TokenOutOfRange):
        client.detokenize([267])
    with pytest.raises(errors.InvalidArgument):
        client.detokenize([2**40])


def test_many_sessions_are_listed_in_pages() -> None:
    fake = FakeServer(max_sessions=300)
    client = fake.client()
    for index in range(250):
        client.session(f"s{index}")
    assert len(client.sessions()) == 250
    assert fake.calls.count("ListSessions") == 2


def test_api_keys_part_tenants() -> None:
    fake = FakeServer(api_keys={"a": "one", "b": "two"})
    fake.client(api_key="a").session("s")
    assert fake.client(api_key="b").sessions() == []
    with pytest.raises(errors.Unauthenticated):
        fake.client().sessions()
