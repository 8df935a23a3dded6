"""What happens at the edges of a call: a client that leaves before it begins, a session whose time runs while it works,
answers that are remembered after what they said was forgotten."""

from __future__ import annotations

import time

import numpy as np
import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from tests.contract.scene import fresh
from tests.service.running import RunningServer
from tests.service.talk import Talk, cancelled, encode, ids_of, until, user


def test_a_generate_whose_client_leaves_before_it_is_taken_is_cancelled(small: RunningServer) -> None:
    talk = Talk(small, user("one two three", "q"))
    request = talk.generating(200, ignore_eos=True)
    busy = small.server._thread.submit(lambda: time.sleep(0.5))
    stream = small.stream(request)
    time.sleep(0.1)
    stream.cancel()
    busy.result()
    until(lambda: not talk.state.busy, "the end of a Generate that nobody reads")
    assert talk.state.num_tokens < 100
    talk.close()


def test_a_generate_lost_before_its_first_token_is_made_by_the_retry(small: RunningServer) -> None:
    talk = Talk(small, user("one two three", "q"))
    request = talk.generating(3, ignore_eos=True)
    with small.hold(after=0):
        stream = small.stream(request)
        until(lambda: talk.state.busy, "the Generate to begin")
        stream.cancel()
        until(lambda: cancelled(talk), "the cancellation")
    until(lambda: not talk.state.busy, "the cancelled Generate to end")
    events = list(small.stream(request))
    assert events[-1].done.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(ids_of(events)) == 3
    talk.close()


def test_time_without_a_call_starts_when_a_call_ends(small: RunningServer) -> None:
    created = small.call(
        pb.CreateSessionRequest(request_id=fresh(), messages=[user("one two", "q")], ttl_s=1.5)
    ).session.session_id
    request = pb.GenerateRequest(request_id=fresh(), session_id=created, max_tokens=3, ignore_eos=True)
    with small.hold(after=1):
        stream = small.stream(request)
        next(stream)
        time.sleep(2.5)
        small.release()
        assert list(stream)[-1].done.finish_reason == pb.FINISH_REASON_LENGTH
    time.sleep(1.0)
    assert small.state(created).turn == 1
    time.sleep(2.0)
    with pytest.raises(errors.SessionNotFound):
        small.state(created)


@pytest.mark.parametrize("by", ["forget", "close"])
def test_no_retry_replays_what_was_forgotten(small: RunningServer, by: str) -> None:
    talk = Talk(small, user("one two three", "q"))
    secret = encode("the secret word")
    request = talk.generating(len(secret), force_token_ids=secret, ignore_eos=True)
    first = list(small.stream(request))
    assert ids_of(first) == secret
    if by == "forget":
        message = first[-1].done.message.message_id
        talk.append(user("thanks", "t"))
        talk.edit(pb.Directive(message=pb.MessageTarget(message_id=message, whole=True), mode=pb.MODE_FORGET))
    else:
        small.call(pb.CloseSessionRequest(request_id=fresh(), session_id=talk.id))
    again = list(small.stream(request))
    assert ids_of(again) == []
    assert b"secret" not in b"".join(event.SerializeToString() for event in again)
    assert again[-1].done.usage == first[-1].done.usage, "it still acts once"
    if by == "forget":
        talk.close()


def test_free_rows_hold_nothing(small: RunningServer) -> None:
    talk = Talk(small, user("one two three four five six", "q"))
    talk.generate(5)
    talk.close()
    small.server._thread.submit(small.parts.engine.cache.clear_caches).result()
    cache = small.parts.engine.cache
    free = np.flatnonzero(cache.table._refs.sum(0) == 0)
    rows = cache.pool.c_kv[:, free].nan_to_num(0.0)
    assert not rows.any(), "NaN was never written; all else is zero again"


def test_a_message_that_goes_on_after_a_stop_string_is_told_whole(small: RunningServer) -> None:
    talk = Talk(small, user("one two", "q"))
    ids = encode("abXcdX")
    first = talk.generate(len(ids), force_token_ids=ids, stop=["X"], ignore_eos=True)
    assert first.stop_string == "X"
    shown = len(first.message.text)
    second = talk.generate(len(ids), force_token_ids=encode("cdX"), stop=["X"], ignore_eos=True)
    assert second.message.text.endswith("cd")
    assert len(second.message.text) > shown
    talk.close()


def test_a_raw_generate_does_not_leave_a_cut_message_open(small: RunningServer) -> None:
    talk = Talk(small, user("one two", "q"))
    talk.generate(2, ignore_eos=True)
    with pytest.raises(errors.InvalidArgument, match="cut short"):
        talk.generate(2, raw=True)
    talk.append(user("more", "m"))
    assert not any(span.open for span in talk.state.messages)
    assert talk.generate(2, raw=True, ignore_eos=True).usage.generated == 2
    talk.close()


def test_ids_too_long_for_a_header_are_refused_by_their_bound(small: RunningServer) -> None:
    talk = Talk(small, user("one two", "q"))
    for directive in (
        pb.Directive(message=pb.MessageTarget(message_id="x" * 9000)),
        pb.Directive(tool_call_id="x" * 9000),
        pb.Directive(edit_id="x" * 9000, mode=pb.MODE_FORGET),
    ):
        with pytest.raises(errors.InvalidArgument) as caught:
            talk.edit(directive)
        assert (caught.value.reason, caught.value.metadata["limit"]) == ("TOO_LONG", "128")
    talk.close()
