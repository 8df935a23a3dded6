"""Where a Generate stops, and that sampling is reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from tests.service.running import RunningServer, special
from tests.service.talk import Talk, encode, ids_of, text_of, user

END = special("<|end|>")


@pytest.fixture
def talk(small: RunningServer) -> Iterator[Talk]:
    talk = Talk(small, user("what is the answer to all of it?", "q"))
    yield talk
    talk.close()


def say(talk: Talk, text: str, **fields: Any) -> tuple[str, pb.GenerateDone, list[pb.GenerateResponse]]:
    """Forces a text. (what was streamed, the end, all events)."""
    events = list(talk.stream(len(encode(text)) + 4, force_token_ids=[*encode(text), END], **fields))
    return text_of(events), events[-1].done, events


@pytest.mark.parametrize("stop", ["beta", "a beta g", "b", "beta gamma", "ta"])
def test_a_stop_string_ends_the_message_before_it(talk: Talk, stop: str) -> None:
    streamed, done, _ = say(talk, "alpha beta gamma", stop=[stop, "never"])
    before = "alpha beta gamma".split(stop)[0]
    assert (streamed, done.message.text) == (before, before)
    assert (done.finish_reason, done.stop_string) == (pb.FINISH_REASON_STOP_STRING, stop)
    assert done.message.open


def test_the_first_of_several_stop_strings_wins(talk: Talk) -> None:
    streamed, done, _ = say(talk, "one two three four", stop=["four", "three", "two"])
    assert (streamed, done.stop_string) == ("one ", "two")


def test_a_stop_string_over_many_tokens(talk: Talk) -> None:
    streamed, done, events = say(talk, "0123456789", stop=["345678"])
    assert (streamed, done.stop_string) == ("012", "345678")
    assert ids_of(events) == encode("012345678")  # ids are sent as they come; text is held back


def test_what_was_held_back_comes_when_it_is_no_stop_string(talk: Talk) -> None:
    streamed, done, _ = say(talk, "0120123012", stop=["01239", "3013"])
    assert streamed == done.message.text == "0120123012"
    assert (done.finish_reason, done.stop_string) == (pb.FINISH_REASON_STOP, "")


def test_what_was_held_back_comes_when_max_tokens_end_it(talk: Talk) -> None:
    events = list(talk.stream(3, force_token_ids=encode("0123"), stop=["0123"]))
    assert text_of(events) == events[-1].done.message.text == "012"


def test_a_stop_string_inside_characters_of_several_bytes(talk: Talk) -> None:
    streamed, done, _ = say(talk, "x漢字🙂y", stop=["字🙂"])
    assert (streamed, done.stop_string) == ("x漢", "字🙂")


def test_a_stopped_message_is_closed_by_the_next_append(talk: Talk) -> None:
    say(talk, "alpha beta gamma", stop=["beta"])
    talk.append(user("go on"))
    (_, said, _) = talk.state.messages
    assert not said.open
    assert said.text.startswith("alpha beta")  # tokens are never cut: the stop string stays in the session


def test_stop_token_ids(talk: Talk) -> None:
    ids = encode("123456")
    events = list(talk.stream(9, force_token_ids=ids, stop_token_ids=[ids[2]]))
    assert ids_of(events) == ids[:3]
    assert events[-1].done.finish_reason == pb.FINISH_REASON_STOP


def test_ignore_eos(talk: Talk) -> None:
    done = talk.generate(5, force_token_ids=[*encode("12"), END, *encode("34")], ignore_eos=True)
    assert (done.usage.generated, done.finish_reason) == (5, pb.FINISH_REASON_LENGTH)


def test_raw_goes_on_with_the_tokens(talk: Talk) -> None:
    length = talk.state.num_tokens
    done = talk.generate(3, force_token_ids=encode("123"), raw=True)
    assert (done.num_tokens, done.message.role, done.message.start) == (length + 3, pb.ROLE_RAW, length)
    assert done.message.text == "123"


def test_without_max_tokens_the_servers_default_or_what_fits(small: RunningServer) -> None:
    talk = Talk(small, ids=list(range(200, 690)))
    request = talk.generating(1, raw=True, ignore_eos=True)
    request.ClearField("max_tokens")
    *_, last = small.stream(request)
    assert last.done.usage.generated == 10  # the context is 500
    talk.close()


# ---------------------------------------------------------------- sampling


def sampled(talk: Talk, length: int = 8, **fields: Any) -> list[int]:
    """What a fork of the session says: the session itself stays as it is."""
    fork = talk.call(pb.ForkSessionRequest(request_id=f"f{next(_numbers)}", session_id=talk.id)).session.session_id
    request = talk.generating(length, raw=True, ignore_eos=True, sampling=pb.Sampling(**fields))
    request.session_id = fork
    events = list(talk.server.stream(request))
    talk.call(pb.CloseSessionRequest(request_id=f"c{next(_numbers)}", session_id=fork))
    ids = ids_of(events)
    assert len(ids) == length
    return ids


_numbers = iter(range(10**6))


def test_a_seed_gives_the_same_tokens(talk: Talk) -> None:
    for fields in ({"temperature": 1.0}, {"temperature": 2.0, "top_k": 50}, {"temperature": 1.5, "top_p": 0.9}):
        assert sampled(talk, seed=7, **fields) == sampled(talk, seed=7, **fields)
        assert sampled(talk, seed=7, **fields) != sampled(talk, seed=8, **fields)
    assert sampled(talk, temperature=2.0) != sampled(talk, temperature=2.0)


def test_what_leaves_one_token_is_greedy(talk: Talk) -> None:
    greedy = sampled(talk)
    assert sampled(talk, temperature=0.0, seed=3) == greedy
    assert sampled(talk, temperature=5.0, top_k=1) == greedy
    assert sampled(talk, temperature=1.0, top_p=1e-9) == greedy


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-40},
        {"temperature": 1e-8},
        {"temperature": 100.0},
        {"temperature": 1.0, "top_p": 5e-324},
        {"temperature": 1.0, "top_p": 1e-40},
        {"temperature": 1.0, "top_p": math.nextafter(1.0, 0.0)},
        {"temperature": 1.0, "top_k": 2**62},
        {"temperature": 1.0, "seed": -(2**63)},
        {"temperature": 1.0, "seed": 2**63 - 1},
        {"temperature": 1.0, "seed": -1},
    ],
)
def test_the_edges_of_what_is_legal(talk: Talk, fields: dict[str, Any]) -> None:
    ids = sampled(talk, **fields)
    assert all(0 <= token < 1280 for token in ids)
    if fields.get("temperature", 1) < 1e-7 or fields.get("top_p", 1) < 1e-30:
        assert ids == sampled(talk)
