"""Scenes: short conversations in which an edit does, or does not, take away what a later answer rests on.

An agent is asked about small files and reads them with a tool. A scene says which result is edited, when, what comes
instead, and what the answer is for whoever still has the result (`told`) and for whoever reads what stands there now
(`instead`; empty where nothing does). Names and values are drawn anew for every scene, and the answers that are
compared begin differently. Owns text; knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from leyline_proto import leyline_pb2 as pb

SYSTEM_PROMPT: Final = "You answer questions about files. Read them with read_file."
READ_FILE: Final = pb.Tool(
    name="read_file",
    description="Read a text file.",
    parameters_json=json.dumps(
        {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}, sort_keys=True
    ),
)
CLEARED: Final = "[cleared]"
CONTEXTS: Final = (40, 301, 700)  # lengths of texts in front of others, in tokens
_ONSETS: Final = (*"bdfghjklmnprstvz", "br", "dr", "gr", "pl", "st", "tr")
_VOWELS: Final = "aeiou"
_CODAS: Final = ("", "", "n", "r", "s", "l", "x")


@dataclass(frozen=True, slots=True)
class SceneEdit:
    """The text of this message, the result of reading `path`, gives way to `text`."""

    message_id: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are appended and computed; then edits, each behind what was computed from its result."""

    messages: tuple[pb.Message, ...]
    edits: tuple[SceneEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """`key`, `path`: what is asked for, and where. `question`: the last one. `lead`: what a bare answer says first.

    calls: the answer is a call that reads the file `told`, not a text. same_answer: the edits take away nothing that
    the answer rests on; else F and R have to differ.
    """

    kind: str
    steps: tuple[Step, ...]
    told: str
    key: str
    path: str
    question: str
    instead: str = ""
    lead: str = ""
    calls: bool = False
    same_answer: bool = False

    @property
    def num_edits(self) -> int:
        return sum(len(step.edits) for step in self.steps)


KINDS: Final = (
    "untouched",
    "removed",
    "removed later",
    "replaced",
    "outdated",
    "pointer removed",
    "pointer replaced",
    "removed (8 edits)",
    "replaced (8 edits)",
)
"""untouched: the answer rests on another file: nothing should change.
removed: the asked value stood in a result that is cleared once the next one was computed; nothing else says it.
removed later: it is cleared once the agent's next message, and what that read, were computed.
replaced: R is the same file with another value.
outdated: an older reading of the file stands in the history; the newer one is cleared.
pointer removed, pointer replaced: the result says where the value is to be found; two hops.
(8 edits): after seven edits of results that nobody needs any more; any other number may stand there."""


def make_scene(kind: str, seed: int, variant: int = 0) -> Scene:
    """Scenes of one kind and seed differ between variants, 0 and 1, in `told` alone. Raises KeyError for an unknown
    kind."""
    name, _, edits = kind.removesuffix(")").partition(" (")
    author = Author(Random(f"{name}/{seed}"), variant)
    before = tuple(_answered(author, int(edits.split()[0]) - 1)) if edits else ()
    return _MAKERS[name](author, kind, before)


def text(seed: int, num_tokens: int) -> str:
    """Made-up files, long enough for so many tokens of up to eight characters."""
    author = Author(Random(f"text/{seed}"), 0)
    files: list[str] = []
    while sum(map(len, files)) < 8 * num_tokens:
        files.append(author.file(author.word(), author.number())(author.number()))
    return "\n\n".join(files)


def read_call(path: str, call_id: str = "") -> pb.ToolCall:
    arguments = json.dumps({"path": path}, separators=(",", ":"))
    return pb.ToolCall(id=call_id, name=READ_FILE.name, arguments_json=arguments)


@dataclass
class Author:
    """Draws words and files, and keeps count of messages."""

    rng: Random
    variant: int
    _count: int = 0
    _taken: set[str] = field(default_factory=set)

    def word(self, onset: str = "") -> str:
        rng = self.rng
        while True:
            parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
            if onset:
                parts[0] = onset + parts[0][-1]
            word = "".join(parts) + rng.choice(_CODAS)
            if word not in self._taken:
                self._taken.add(word)
                return word

    def path(self) -> str:
        return f"{self.word()}.ini"

    def number(self, first: str = "") -> str:
        while True:
            number = (first or self.rng.choice("123456789")) + "".join(self.rng.choices("0123456789", k=3))
            if number not in self._taken:
                self._taken.add(number)
                return number

    def answers(self, make: Callable[[str], str], firsts: str) -> tuple[str, str]:
        """(told, instead): of this variant, and of all. All three that there are begin differently."""
        one, other, instead = (make(first) for first in self.rng.sample(firsts, 3))
        return (one, other)[self.variant], instead

    def file(self, key: str, value: str, others: tuple[int, int] = (2, 4)) -> Callable[[str], str]:
        """The file's text as a function of the key's value: everything else is the same in all variants. `others`: how
        many other lines there are, at least and at most."""
        names = [self.word() for _ in range(self.rng.randint(*others))]
        lines = [f"{name} = {self.number()}" for name in names]
        at = self.rng.randint(0, len(lines))
        return lambda said: "\n".join([*lines[:at], f"{key} = {said}", *lines[at:]])

    def id(self) -> str:
        self._count += 1
        return f"s{self._count}"

    def user(self, content: str) -> pb.Message:
        return pb.Message(role=pb.ROLE_USER, content=content, message_id=self.id())

    def says(self, content: str) -> pb.Message:
        return pb.Message(role=pb.ROLE_ASSISTANT, content=content, message_id=self.id())

    def reads(self, *files: tuple[str, str]) -> list[pb.Message]:
        """One message with the calls, and a result each: (path, content)."""
        calls = [read_call(path, self.id()) for path, _ in files]
        asks = pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=calls, message_id=self.id())
        results = [
            pb.Message(role=pb.ROLE_TOOL, content=content, tool_call_id=call.id, message_id=self.id())
            for call, (_, content) in zip(calls, files, strict=True)
        ]
        return [asks, *results]


Before = tuple[Step, ...]


def _first(before: Before, author: Author) -> list[pb.Message]:
    """The system message, unless it stands already."""
    return [] if before else [pb.Message(role=pb.ROLE_SYSTEM, content=SYSTEM_PROMPT, message_id=author.id())]


def asks_one(key: str, path: str) -> str:
    return f"What is {key} in {path}?"


def _asks_two(key: str, path: str, key2: str, path2: str) -> str:
    return f"What is {key} in {path} and {key2} in {path2}?"


def _answered(author: Author, count: int) -> Iterator[Step]:
    """So many questions with their answers; each result is cleared once its answer was computed."""
    for number in range(count):
        key, path, value = author.word(), author.path(), author.number()
        asks, result = author.reads((path, author.file(key, value)(value)))
        messages = [author.user(asks_one(key, path)), asks, result, author.says(value)]
        yield Step((*(_first((), author) if not number else []), *messages), (_cleared(result, path),))


def _cleared(result: pb.Message, path: str) -> SceneEdit:
    return SceneEdit(result.message_id, path, CLEARED)


def _untouched(author: Author, kind: str, before: Before) -> Scene:
    before = before or tuple(_answered(author, 1))
    key, path = author.word(), author.path()
    told, _ = author.answers(author.number, "123456789")
    asks, result = author.reads((path, author.file(key, told)(told)))
    question = asks_one(key, path)
    last = Step((author.user(question), asks, result))
    return Scene(kind, (*before, last), told, key, path, question, told, same_answer=True)


def _removed(author: Author, kind: str, before: Before) -> Scene:
    """Two files read by one message; the first result is edited once the second was computed."""
    key, key2, path, path2 = author.word(), author.word(), author.path(), author.path()
    told, instead = author.answers(author.number, "123456789")
    content, value2 = author.file(key, told), author.number()
    asks, first, second = author.reads((path, content(told)), (path2, author.file(key2, value2)(value2)))
    question = _asks_two(key, path, key2, path2)
    replaced = kind.startswith("replaced")
    edit = SceneEdit(first.message_id, path, content(instead)) if replaced else _cleared(first, path)
    step = Step((*_first(before, author), author.user(question), asks, first, second), (edit,))
    return Scene(kind, (*before, step), told, key, path, question, instead if replaced else "")


def _removed_later(author: Author, kind: str, before: Before) -> Scene:
    """One of two files points on, and the agent follows; the other one's result goes once it has."""
    key, key2, path, path2, other = author.word(), author.word(), author.path(), author.path(), author.path()
    told, _ = author.answers(author.number, "123456789")
    value = author.number()
    question = _asks_two(key, path, key2, path2)
    pointer = (path, author.file(key, other)(f"see {other}"))
    asks, first, second = author.reads(pointer, (path2, author.file(key2, told)(told)))
    next_asks, third = author.reads((other, author.file(key, value)(value)))
    messages = [*_first(before, author), author.user(question), asks, first, second, next_asks, third]
    step = Step(tuple(messages), (_cleared(second, path2),))
    return Scene(kind, (*before, step), told, key2, path2, question, lead=f"{value}, ")


def _outdated(author: Author, kind: str, before: Before) -> Scene:
    """The file was read before, with another value; it changed and was read again together with another one."""
    key, path = author.word(), author.path()
    told, old = author.answers(author.number, "123456789")
    content = author.file(key, old)
    asks, result = author.reads((path, content(old)))
    earlier = Step((*_first(before, author), author.user(asks_one(key, path)), asks, result, author.says(old)))
    key2, path2, value2 = author.word(), author.path(), author.number()
    again, first, second = author.reads((path, content(told)), (path2, author.file(key2, value2)(value2)))
    question = _asks_two(key, path, key2, path2)
    step = Step((author.user(question), again, first, second), (_cleared(first, path),))
    return Scene(kind, (*before, earlier, step), told, key, path, question, old)


def _pointer(author: Author, kind: str, before: Before) -> Scene:
    """The first file says where to look: the next thing to do is a call."""
    key, key2, path, path2 = author.word(), author.word(), author.path(), author.path()
    told, instead = author.answers(lambda first: f"{author.word(first)}.ini", "bdfghjklmnprstvz")
    value2 = author.number()
    content = author.file(key, told)
    asks, first, second = author.reads((path, content(f"see {told}")), (path2, author.file(key2, value2)(value2)))
    replaced = kind.startswith("pointer replaced")
    edit = SceneEdit(first.message_id, path, content(f"see {instead}")) if replaced else _cleared(first, path)
    question = _asks_two(key, path, key2, path2)
    step = Step((*_first(before, author), author.user(question), asks, first, second), (edit,))
    return Scene(kind, (*before, step), told, key, path, question, instead if replaced else "", calls=True)


_MAKERS: Final[dict[str, Callable[[Author, str, Before], Scene]]] = {
    "untouched": _untouched,
    "removed": _removed,
    "removed later": _removed_later,
    "replaced": _removed,
    "outdated": _outdated,
    "pointer removed": _pointer,
    "pointer replaced": _pointer,
}
