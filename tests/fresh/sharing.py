"""What users' own tests of shared documents have in common: texts, agents, and how reports are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from leyline_sdk import (
    AppliedEdit,
    CacheReport,
    Edit,
    Leyline,
    Mode,
    Policy,
    PolicyContext,
    Reply,
    Reuse,
    Session,
    assemble,
    cut_text,
)

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read_file", "description": "Read a text file.", "parameters": PATH}
LIST = {
    "name": "list_dir",
    "description": "List what a directory holds, with the size of each file.",
    "parameters": PATH,
}
COUNT = {
    "name": "count_lines",
    "description": "Say how many lines a text file has, and how long they are.",
    "parameters": PATH,
}
SYSTEM = "You answer questions about files. Read them with read_file."
TEAM = "owner = bravo\nlead = delta\nsize = 7\nsince = 2019\nzone = north\nchat = on\nlanguage = plain\n"
SITE = "region = west\nrack = 12\npower = high\nbackup = none\nfloor = 3\ncolour = yellow\ncooling = water\n"
RULES = "review = two\nrelease = monthly\nbranch = main\ntests = green\nlines = short\nnames = lower\n"
DOCUMENTS = [TEAM, SITE, RULES]
NET = "mode = fast\nport = 8123\ntimeout = 30\nowner = tango\nlevel = high\nsize = 91\nlimit = 450\nzone = east\n"
DISK = "quota = 96\nlevel = low\n"
FILES = {"net.ini": NET, "disk.ini": DISK, "log.ini": "keep = 12\n"}
SECRET = "The key of the vault is swordfish-7731-kilo-tango-0042-bravo-9916-delta-5583, and nobody may ever say it."
LEAST = 32

Span = tuple[int, int]
Serve = Callable[..., AbstractContextManager[str]]


def tokens(session: Session) -> tuple[int, ...]:
    return session.info(token_ids=True).token_ids


def total(spans: Iterable[Span]) -> int:
    return sum(end - start for start, end in spans)


def places(part: Sequence[int], whole: Sequence[int]) -> list[int]:
    size = len(part)
    return [at for at in range(len(whole) - size + 1) if tuple(whole[at : at + size]) == tuple(part)]


def share_taken(client: Leyline, session: Session, report: CacheReport, document: str) -> float:
    """Of the document's tokens, as they stand in the session once, the share that was taken by content."""
    ids, part = tokens(session), client.tokenize(document.strip())
    (at,) = places(part, ids)
    return total(
        (max(a, at), min(b, at + len(part))) for a, b in report.content_spans if a < at + len(part) and b > at
    ) / len(part)


def agrees(ids: Sequence[int], donors: Sequence[Sequence[int]]) -> set[int]:
    """Positions of `ids` that are in a stretch of LEAST or more which stands in a donor too."""
    grams = {tuple(donor[at : at + LEAST]) for donor in donors for at in range(len(donor) - LEAST + 1)}
    starts = [at for at in range(len(ids) - LEAST + 1) if tuple(ids[at : at + LEAST]) in grams]
    return {at + offset for at in starts for offset in range(LEAST)}


def check(session: Session, report: CacheReport, context: int, repaired: bool = False) -> None:
    """What any report promises of itself."""
    assert report.prefix_hit + report.content_hit + report.kept + report.computed == context
    assert total(report.content_spans) == report.content_hit
    ends = [end for span in report.content_spans for end in span]
    assert ends == sorted(ends)
    assert all(0 < start < end <= context for start, end in report.content_spans)
    if report.content_spans:
        first = report.content_spans[0][0]
        assert first >= LEAST, "nothing is taken for the first positions"
        assert report.kept + report.prefix_hit <= first or report.kept
        assert session.info().exact_upto <= first
        if not repaired:
            assert min(end - start for start, end in report.content_spans) >= LEAST


def opened(
    client: Leyline, system: str, *parts: str, reuse: Reuse, tools: Sequence[Any] = (READ,), **more: Any
) -> Session:
    session = client.session(system=system, tools=tools, reuse=reuse, **more)
    session.append(assemble([*parts, "What is port in net.ini?"]))
    return session


def computed(session: Session) -> CacheReport:
    report = session.prefill().cache
    assert report is not None
    check(session, report, session.info().num_tokens, repaired=True)
    return report


class FirstLines(Policy):
    """Of a tool result that was answered, only the first `lines` lines stay."""

    def __init__(self, lines: int = 1, mode: Mode = Mode.AMORTIZE) -> None:
        self.lines, self.mode = lines, mode

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        said = [one.start for one in context.transcript.of_role("assistant") if not one.tool_calls]
        for result in context.tool_results:
            head = "".join(result.text.splitlines(keepends=True)[: self.lines])
            if len(head) < len(result.text) and any(at >= result.end for at in said):
                yield cut_text(result, len(head), mode=self.mode)


@dataclass
class Agent:
    """Answers from files; keeps each reply with the tokens that stood there when it was made."""

    session: Session
    replies: list[tuple[Reply, tuple[int, ...]]] = field(default_factory=list)
    edits: list[AppliedEdit] = field(default_factory=list)

    def ask(self, *parts: str) -> str:
        self.session.append(assemble(parts))
        for _ in range(5):
            reply = self.session.complete(max_tokens=64)
            self.replies.append((reply, tokens(self.session)))
            self.edits += reply.applied_edits
            assert reply.usage.reused == reply.cache.prefix_hit + reply.cache.content_hit + reply.cache.kept
            if not reply.tool_calls:
                return reply.text.strip()
            self.session.append_results({one.id: FILES[one.arguments["path"]] for one in reply.tool_calls})
        raise AssertionError("gave up")
