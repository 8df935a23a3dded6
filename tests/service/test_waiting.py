"""Calls that queue behind a busy session, and requests that queue for slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import Mode, clear, errors
from tests.contract.scene import fresh
from tests.service.running import TIMEOUT_S, RunningServer
from tests.service.talk import Talk, encode, span, until, user

DIGITS = "0123456789"


@pytest.fixture
def talk(small: RunningServer) -> Iterator[Talk]:
    talk = Talk(small, user("what is the answer to all of it?", "q"))
    yield talk
    if any(s.session_id == talk.id for s in small.call(pb.ListSessionsRequest()).sessions):
        talk.close()


class Calls:
    """Calls made in threads of their own, each in the queue before the next one is made."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._threads: list[threading.Thread] = []
        self.answers: dict[int, Any] = {}

    def make(self, call: Callable[[], Any]) -> None:
        index = len(self._threads)

        def run() -> None:
            try:
                self.answers[index] = call()
            except errors.APIError as error:
                self.answers[index] = error

        before = self.waiting()
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        until(lambda: self.waiting() > before, "the call in the session's queue")

    def waiting(self) -> int:
        store = self._talk.server.parts.store
        return self._talk.server.on_engine(lambda: len(store.find("default", self._talk.id).waiting))

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return [self.answers[index] for index in range(len(self._threads))]


def test_calls_wait_in_their_order(talk: Talk) -> None:
    calls = Calls(talk)
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        calls.make(lambda: talk.append(user("one", "one"), wait=True))
        calls.make(lambda: talk.generate(2, force_token_ids=encode("56"), wait=True))
        calls.make(lambda: talk.append(user("two", "two"), wait=True))
    calls.join()
    list(stream)
    assert [m.text for m in talk.state.messages[1:]] == ["1234", "one", "56", "two"]


def test_a_call_without_wait_does_not_overtake(talk: Talk) -> None:
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        with pytest.raises(errors.SessionBusy) as caught:
            talk.append(user("x"))
        assert caught.value.retry_after_s == 1
    list(stream)


def test_edits_and_undo_wait(talk: Talk) -> None:
    calls = Calls(talk)
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        calls.make(lambda: talk.edit(span(6, 8, text="x"), wait=True))
        undo = pb.UndoRequest(request_id=fresh(), session_id=talk.id, edit_id="e1", wait=True)
        calls.make(lambda: talk.call(undo))
    edited, undone = calls.join()
    list(stream)
    assert (edited.version, undone.version) == (1, 2)


def test_an_edit_by_a_second_client_waits(talk: Talk) -> None:
    session = talk.server.client().session(talk.id, create=False)
    calls = Calls(talk)
    edit = clear("q", "what?", mode=Mode.FORGET)
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        with pytest.raises(errors.SessionBusy):
            session.edit(edit)
        calls.make(lambda: session.edit(edit, wait=True))
    (edited,) = calls.join()
    list(stream)
    assert edited.version == 1
    assert talk.state.messages[0].text == "what?"


def test_a_view_that_went_stale_while_it_waited(talk: Talk) -> None:
    calls = Calls(talk)
    length = talk.state.num_tokens
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        calls.make(lambda: talk.append(user("x"), expected_len=length, wait=True))
    (error,) = calls.join()
    list(stream)
    assert isinstance(error, errors.StaleLength)
    assert error.current == talk.state.num_tokens > length


def test_close_goes_first_and_the_others_find_it_gone(talk: Talk) -> None:
    calls = Calls(talk)
    with talk.server.hold(after=2):
        stream = talk.stream(9, force_token_ids=encode("123456789"))
        next(stream)
        calls.make(lambda: talk.append(user("x"), wait=True))
        calls.make(lambda: talk.generate(wait=True))
        calls.make(talk.close)
    appended, generated, freed = calls.join()
    assert isinstance(appended, errors.SessionNotFound)
    assert isinstance(generated, errors.SessionNotFound)
    assert freed > 0
    (*_, last) = stream
    assert last.done.finish_reason == pb.FINISH_REASON_CANCELLED


def test_a_generate_cancelled_while_it_waits(talk: Talk) -> None:
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        waiting = talk.stream(4, wait=True, directives=[span(6, 8, text="x")])
        until(Calls(talk).waiting, "the Generate in the session's queue")
        waiting.cancel()
        # Nothing shows that the server has heard; a call after it on the same connection comes after it.
        until(lambda: talk.state.busy, "the server")
    list(stream)
    until(lambda: not talk.state.busy, "the end of the Generates")
    assert talk.state.messages[-1].text.startswith("1234")


def test_too_many_wait_for_one_session(serve: Callable[..., RunningServer]) -> None:
    talk = Talk(serve(max_queue=2), user("hello", "q"))
    calls = Calls(talk)
    with talk.server.hold(after=2):
        stream = talk.stream(4, force_token_ids=encode("1234"))
        next(stream)
        for name in ("one", "two"):
            calls.make(lambda name=name: talk.append(user(name, name), wait=True))  # type: ignore[misc]
        with pytest.raises(errors.QueueFull) as caught:
            talk.append(user("three"), wait=True)
        assert (caught.value.limit, caught.value.retry_after_s, caught.value.retryable) == (2, 1, True)
    calls.join()
    list(stream)
    assert [m.message_id for m in talk.state.messages[2:]] == ["one", "two"]


# ---------------------------------------------------------------- slots


@pytest.fixture
def narrow(serve: Callable[..., RunningServer]) -> RunningServer:
    """Room for one Generate at a time, and two that wait."""
    return serve(slots=64, max_queue=2)


def test_a_generate_waits_for_slots_and_starts_later(narrow: RunningServer) -> None:
    talks = [Talk(narrow, ids=encode(DIGITS * 2)) for _ in range(3)]
    with narrow.hold(after=1):
        first = talks[0].stream(30, raw=True, ignore_eos=True)
        next(first)
        late = [talk.stream(30, raw=True, ignore_eos=True) for talk in talks[1:]]
        until(lambda: narrow.stats().queued == 2, "two requests in the queue")
        pool = narrow.pool()
        assert (pool.running, pool.queued) == (1, 2)
        spare = Talk(narrow, ids=encode(DIGITS))
        before = spare.state
        for refused in (
            lambda: spare.generate(4, raw=True),
            lambda: spare.generate(4, raw=True, directives=[span(5, 7)]),
            lambda: spare.append(ids=[70], prefill=True, directives=[span(5, 7)]),
            lambda: spare.prefill(),
        ):
            with pytest.raises(errors.QueueFull) as caught:
                refused()
            assert (caught.value.limit, caught.value.retry_after_s) == (2, 1)
            assert spare.state == before
    for stream in (first, *late):
        (*_, last) = stream
        assert (last.done.usage.generated, last.done.finish_reason) == (30, pb.FINISH_REASON_LENGTH)
    assert last.done.usage.queued_ms > 0
    assert spare.generate(4, raw=True).usage.generated >= 1


@pytest.mark.parametrize("max_queue", [1])
def test_the_smallest_queue_still_serves(serve: Callable[..., RunningServer], max_queue: int) -> None:
    talk = Talk(serve(max_queue=max_queue), ids=encode(DIGITS))
    assert talk.generate(2, raw=True, ignore_eos=True).usage.generated == 2


def test_what_can_never_fit_is_refused_and_leaves_the_session_usable(narrow: RunningServer) -> None:
    talk = Talk(narrow, ids=encode(DIGITS * 6))
    talk.prefill()
    before = talk.state
    for max_tokens in (5, 64, 2**40):
        with pytest.raises(errors.ResourceExhausted) as caught:
            talk.generate(max_tokens, raw=True, directives=[span(40, 40, text="1")])
        assert caught.value.reason in ("CONTEXT_EXCEEDED", "POOL_EXCEEDED")
        assert (caught.value.needed, caught.value.limit) == (61 + max_tokens, 64)
        assert talk.state == before
    assert int(caught.value.metadata["free"]) == 3


def test_to_the_last_slot(narrow: RunningServer) -> None:
    """The session is computed, its last token is computed anew, and what is generated fills the pool."""
    talk = Talk(narrow, ids=encode(DIGITS * 6))
    talk.prefill()
    done = talk.generate(4, raw=True, ignore_eos=True)
    assert (done.usage.generated, talk.state.num_tokens) == (4, 64)
    with pytest.raises(errors.ContextExceeded):
        talk.generate(1, raw=True)
    talk.edit(span(30, 40))
    assert talk.generate(raw=True, ignore_eos=True, max_tokens=5).usage.generated == 5
