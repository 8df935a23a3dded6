"""A forward pass that raises in the middle: the session is as it was, and who shared the step never notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from tests.service.running import RunningServer
from tests.service.talk import Talk, ids_of, span, until, user

POISON = 1100


class Poison:
    """Raises in the last layer as long as the batch holds the token; `dose` counts how often it did."""

    def __init__(self, model: Any, token: int) -> None:
        self._token, self._present, self.dose = token, False, 0
        self._hooks = [
            model.register_forward_pre_hook(self._look, with_kwargs=True),
            model.model.layers[-1].register_forward_pre_hook(self._act),
        ]

    def _look(self, module: Any, args: Any, kwargs: Any) -> None:
        self._present = bool((kwargs["input_ids"] == self._token).any())

    def _act(self, module: Any, args: Any) -> None:
        if self._present:
            self.dose += 1
            raise RuntimeError("out of order")

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@contextmanager
def poisoned(server: RunningServer) -> Iterator[Poison]:
    poison = Poison(server.parts.model.model, POISON)
    try:
        yield poison
    finally:
        poison.remove()
        server.check_integrity()


@pytest.fixture
def talk(serve: Callable[..., RunningServer]) -> Talk:
    """Computed, edited once, with a second edit that could be undone."""
    talk = Talk(serve(prefill_chunk=16), ids=list(range(200, 240)))
    talk.prefill()
    talk.edit(span(10, 12, token_ids=pb.TokenIds(ids=[70, 71, 72])))
    return talk


def fails(talk: Talk, call: Callable[[], Any]) -> None:
    """The call is refused because the model failed, and nothing is different from before."""
    server = talk.server
    before, in_use = talk.state, server.pool().in_use
    with poisoned(server) as poison:
        with pytest.raises(errors.ModelFailed) as caught:
            call()
        assert poison.dose
    assert (caught.value.reason, caught.value.metadata) == ("MODEL_FAILED", {"error": "RuntimeError"})
    until(lambda: not talk.state.busy, "the end of the call")
    assert talk.state == before
    assert server.pool().in_use == in_use


@pytest.mark.parametrize("mode", [pb.MODE_AMORTIZE, pb.MODE_FORGET])
def test_append_and_prefill(talk: Talk, mode: Any) -> None:
    cut = span(20, 24, text="1", mode=mode)
    # 30 rows before the poison: the failure comes in the second or third chunk, after others were committed.
    request = talk.appending(ids=[*range(300, 330), POISON], prefill=True, directives=[cut])
    fails(talk, lambda: talk.call(request))
    answer = talk.call(request)  # not remembered: the same request acts now
    assert (answer.version, answer.cache.computed > 30) == (2, True)


def test_edit_and_prefill(talk: Talk) -> None:
    cut = span(20, 24, token_ids=pb.TokenIds(ids=[POISON]))
    fails(talk, lambda: talk.edit(cut, prefill=True))
    undone = talk.call(pb.UndoRequest(request_id="back", session_id=talk.id, edit_id="e1"))
    assert (undone.restored, undone.restored_with_kv) == (2, 2)


def test_generate_with_directives(talk: Talk) -> None:
    cut = span(20, 24, token_ids=pb.TokenIds(ids=[POISON]))
    request = talk.generating(4, directives=[cut], raw=True)
    fails(talk, lambda: list(talk.server.stream(request)))
    *_, last = talk.server.stream(request)
    assert (last.done.version, last.done.usage.generated) == (2, 4)


def test_generate_without_directives_leaves_no_message(talk: Talk) -> None:
    talk.append(user("hello", "q"))
    talk.append(ids=[POISON])
    before = talk.state
    with poisoned(talk.server), pytest.raises(errors.ModelFailed):
        talk.generate()
    after = talk.state
    assert (after.messages, after.version, after.turn) == (before.messages, before.version, before.turn)
    assert talk.generate(3, ignore_eos=True).usage.generated == 3


def test_a_failure_after_the_first_token_keeps_what_was_sent(talk: Talk) -> None:
    talk.prefill()
    seen: list[pb.GenerateResponse] = []
    with poisoned(talk.server), pytest.raises(errors.ModelFailed):
        seen.extend(talk.stream(9, force_token_ids=[80, 81, POISON, 82], raw=True))
    state = talk.state
    assert list(state.token_ids)[-3:] == [80, 81, POISON]
    assert (state.turn, state.messages[-1].role) == (1, pb.ROLE_RAW)
    talk.append(user("go on"))


def test_neighbours_in_the_step_survive(talk: Talk) -> None:
    server = talk.server
    alone = Talk(server, ids=list(range(400, 430)))
    expected = ids_of(list(alone.stream(6, raw=True, ignore_eos=True)))
    neighbour = Talk(server, ids=list(range(400, 430)))
    bad = Talk(server, ids=[*range(500, 506), POISON, 507])
    before = bad.state
    with poisoned(server) as poison, server.hold():
        first = bad.stream(6, raw=True)
        until(lambda: server.stats().queued == 1, "the first request in the queue")
        second = neighbour.stream(6, raw=True, ignore_eos=True)
        until(lambda: server.stats().queued == 2, "both requests in the queue")
        server.release()
        events = list(second)
        with pytest.raises(errors.ModelFailed):
            list(first)
        assert poison.dose >= 2  # once packed, once alone
    assert ids_of(events) == expected
    assert bad.state == before


def test_the_server_goes_on(talk: Talk) -> None:
    for _ in range(3):
        fails(talk, lambda: talk.append(ids=[POISON], prefill=True))
    assert talk.generate(4, raw=True, ignore_eos=True).usage.generated == 4


def test_logits_that_are_no_numbers(serve: Callable[..., RunningServer]) -> None:
    """Not every failure raises; what such a pass computed must not stay either."""
    talk = Talk(serve(), ids=list(range(600, 620)))
    layer = talk.server.parts.model.model.model.layers[0]  # so that the KV of the next one is no number either
    hook = layer.register_forward_hook(lambda module, args, out: out * float("nan"))
    with pytest.raises(errors.ModelFailed):
        talk.generate(2, raw=True)
    hook.remove()
    assert talk.generate(2, raw=True, ignore_eos=True).usage.generated == 2
