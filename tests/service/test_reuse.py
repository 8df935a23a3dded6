"""Reuse of content over gRPC: who finds which document where, who finds nothing, and that an answer still comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from string import ascii_letters
from typing import Any

import pytest

from leyline_sdk import CacheReport, Leyline, Repair, Reuse, Session, assemble, errors
from tests.service.running import RunningServer
from tests.service.talk import encode

_numbers = count(1)
SYSTEM = "You answer questions about files. Read them with read_file."
LONGER = f"{SYSTEM} Say what they say and nothing else, and begin where it begins."
"""More than 32 tokens, so that nothing behind it stands at a session's first positions."""
READ = {
    "name": "read_file",
    "description": "Read a text file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
FILES = {"net.ini": "mode = fast\nport = 8123\n"}
SHARED = [
    "owner = bravo\nlead = delta\nsize = 7\nsince = 2019\nzone = north\nchat = on\nlanguage = plain\n",
    "region = west\nrack = 12\npower = high\nbackup = none\nfloor = 3\nkey = yellow\ncooling = water\n",
]


def document() -> str:
    """Some hundred tokens that no other test has."""
    draw = random.Random(next(_numbers))
    return "".join("".join(draw.choices(ascii_letters, k=7)) + draw.choice([" ", ".\n", "\n\n"]) for _ in range(12))


def opened(client: Leyline, reuse: Reuse | None = Reuse.CONTENT, **settings: Any) -> Session:
    return client.session(**{"system": LONGER, "reuse": reuse, **settings})


def report_of(session: Session, *parts: str) -> CacheReport:
    """What it takes to prefill the parts, in a session that is closed again."""
    session.append(assemble(parts))
    report = session.prefill().cache
    assert report is not None
    assert report.prefix_hit + report.content_hit + report.kept + report.computed == session.info().num_tokens
    assert report.content_hit == sum(end - start for start, end in report.content_spans)
    session.close()
    return report


def where(client: Leyline, *parts: str) -> list[tuple[int, int]]:
    """[start, end) of each part in a session of them."""
    session = opened(client)
    header = session.info().num_tokens + 1  # the user's marker
    session.close()
    starts = [len(encode("".join(f"{part.strip()}\n\n" for part in parts[:i]))) for i in range(len(parts))]
    return [(header + at, header + at + len(encode(part.strip()))) for at, part in zip(starts, parts, strict=True)]


def covers(report: CacheReport, *places: tuple[int, int]) -> bool:
    """The spans are these places, but for what their neighbours' separators add and their last token loses."""
    if len(report.content_spans) != len(places):
        return False
    return all(
        abs(start - low) <= 2 and abs(end - high) <= 3
        for (start, end), (low, high) in zip(report.content_spans, places, strict=True)
    )


def test_documents_are_found_where_they_now_stand(client: Leyline) -> None:
    one, other, new = document(), document(), document()
    first = report_of(opened(client, Reuse.REGISTER), one, "between the two", other, "what is in them?")
    assert first.content_hit == 0
    order = (new, other, "something else", one, "and now?")
    report = report_of(opened(client), *order)
    places = where(client, *order)
    assert covers(report, places[1], places[3]), (report, places)
    assert report.turned == report.content_hit


def test_an_answer_still_comes(tiny: RunningServer) -> None:
    client = tiny.client()
    answers = []
    for documents in (SHARED, SHARED[::-1]):
        session = opened(client, system=SYSTEM, tools=[READ])
        session.append(assemble([*documents, "What is port in net.ini?"]))
        hits = []
        for _ in range(4):
            reply = session.complete(max_tokens=48)
            hits.append(reply.cache.content_hit)
            if not reply.tool_calls:
                break
            session.append_results({call.id: FILES[call.arguments["path"]] for call in reply.tool_calls})
        answers.append(reply.text)
        info = session.info()
        assert info.reuse is Reuse.CONTENT
        assert info.exact_upto < 80 if sum(hits) else info.exact_upto >= info.num_tokens - 1
        session.close()
    assert answers == ["8123", "8123"]
    assert hits[0] > 60


def test_another_tenant_finds_nothing(serve: Callable[..., RunningServer]) -> None:
    house = serve(api_keys={"ann": "a", "abe": "a", "bob": "b"})
    text = document()
    with house.client(api_key="ann") as ann:
        opened(ann).warm(text)
    for key, found in (("bob", False), ("abe", True)):
        with house.client(api_key=key) as client:
            assert (report_of(opened(client), "in front", text, "?").content_hit > 0) == found


@pytest.mark.parametrize("reuse", list(Reuse))
def test_warm_makes_the_first_use_a_hit(client: Leyline, reuse: Reuse) -> None:
    texts = [document(), document()]
    session = opened(client, reuse, tools=[READ])
    before = session.info()
    sessions = len(client.sessions())
    warmed = session.warm(texts)
    assert [one.num_tokens for one in warmed] == [len(encode(text)) for text in texts]
    assert all(one.reused <= 2 for one in warmed)  # where another test's document begins alike
    assert all(one.computed + one.reused == one.num_tokens for one in warmed)
    again = session.warm(texts)
    assert [(one.num_tokens, one.computed, one.reused) for one in again] == [
        (one.num_tokens, 1, one.num_tokens - 1) for one in warmed
    ]
    assert session.info() == before
    assert len(client.sessions()) == sessions
    session.close()
    order = ("in front of them", texts[1], texts[0], "?")
    report = report_of(opened(client), *order)
    places = where(client, *order)
    assert covers(report, *places[1:3]) or covers(report, (places[1][0], places[2][1])), (report, places)


def test_warm_without_a_system_message(client: Leyline) -> None:
    text = document()
    with client.session() as bare:
        bare.warm(text)
        length = len(encode(text))
        report = report_of(opened(client), "in front", text, "?")
        assert length - 34 <= report.content_hit <= length - 32  # it stood at the session's first positions
        bare.close()
    with client.session(tools=[READ]) as listed:  # the list of tools stands in front of it
        text = document()
        listed.warm(text)
        assert report_of(opened(client), "in front", text, "?").content_hit >= len(encode(text)) - 2
        listed.close()


def test_a_short_document_is_not_found(client: Leyline) -> None:
    session = opened(client)
    short = document()[:25]
    (warmed,) = session.warm(short)
    assert warmed.num_tokens < 32
    assert report_of(session, "in front", short, "?").content_hit == 0


def test_a_session_that_does_not_ask_takes_nothing(client: Leyline) -> None:
    text = document()
    opened(client).warm(text)
    for reuse in (None, Reuse.PREFIX, Reuse.REGISTER):
        report = report_of(opened(client, reuse), "in front", text, "?")
        assert (report.content_hit, report.content_spans) == (0, ())


def test_a_fork_and_a_resumed_session_go_on_taking(client: Leyline) -> None:
    text = document()
    session = opened(client)
    session.warm(text)
    assert report_of(session.fork(), "in front", text, "?").content_hit > 0
    assert report_of(client.session(session.id), "another in front", text, "?").content_hit > 0
    with pytest.raises(errors.SessionNotFound):
        session.info()


@pytest.mark.parametrize(
    ("repair", "share"), [(Repair(first=16), None), (Repair(share=0.5), 0.5), (Repair(share=1), 1)]
)
def test_a_repair_computes_part_of_a_hit(client: Leyline, repair: Repair, share: float | None) -> None:
    text = document()
    opened(client).warm(text)
    whole = report_of(opened(client), "in front", text, "?").content_hit
    part = report_of(opened(client, reuse_repair=repair), "in front of", text, "?").content_hit
    expected = whole - 16 if share is None else whole * (1 - share)
    assert abs(part - expected) <= 2


def test_what_stands_behind_a_hit_is_nobodys_prefix(client: Leyline) -> None:
    text, question = document(), "and what does this long enough question of forty tokens ask, if it asks anything?"
    opened(client).warm(text)
    taken = opened(client)
    taken.append(assemble(["in front", text, question]), prefill=True)
    assert taken.info().exact_upto < where(client, "in front", text)[1][0] + 2
    honest = report_of(opened(client, Reuse.PREFIX), "in front", text, question)
    assert honest.prefix_hit < where(client, "in front", text)[1][0] + 2
    assert report_of(opened(client), "elsewhere", question, "?").content_hit <= len(encode(question))
    taken.close()


def test_a_document_that_does_not_fit_leaves_nothing_open(client: Leyline) -> None:
    sessions = len(client.sessions())
    with opened(client) as session:
        with pytest.raises(errors.ContextExceeded):
            session.warm([document(), document() * 6])
        session.close()
    assert len(client.sessions()) == sessions
