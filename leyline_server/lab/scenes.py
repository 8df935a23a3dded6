"""Scenes: short conversations in which an edit does, or does not, take away what a later answer rests on.

An agent is asked about small files and reads them with a tool. A scene says which result is edited, when, what comes
instead, and what the answer is for whoever still has the result (`told`) and for whoever reads what stands there now
(`instead`; empty where nothing does). Names and values are drawn anew for every scene. Owns text; knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
_ONSETS: Final = (*"bdfghjklmnprstvz", "br", "dr", "gr", "pl", "st", "tr")
_VOWELS: Final = "aeiou"
_CODAS: Final = ("", "", "n", "r", "s", "l", "x")


@dataclass(frozen=True, slots=True)
class SceneEdit:
    """The text of this message gives way to `text`."""

    message_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are appended and computed; then edits, each behind what was computed from its result."""

    messages: tuple[pb.Message, ...]
    edits: tuple[SceneEdit, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """`calls`: the answer is a call that reads the file `told`, not a text. `rest`: what a text goes on with.

    same_answer: the edit takes away nothing that the answer rests on; else F and R have to differ.
    """

    kind: str
    steps: tuple[Step, ...]
    told: str
    instead: str = ""
    rest: str = ""
    calls: bool = False
    same_answer: bool = False

    @property
    def num_edits(self) -> int:
        return sum(len(step.edits) for step in self.steps)


KINDS: Final = ("untouched", "removed", "replaced", "outdated", "pointer removed", "pointer replaced", "8 edits")
"""untouched: the answer rests on another file: nothing should change.
removed: the asked value stood in a result that is cleared; nothing else says it.
replaced: R is the same file with another value.
outdated: an older reading of the file stands in the history; the newer one is cleared.
pointer removed, pointer replaced: the result says where the value is to be found; two hops.
8 edits: as removed, after seven edits of results that nobody needs any more."""


def make_scene(kind: str, seed: int, variant: int = 0) -> Scene:
    """Scenes of one kind and seed differ between variants in `told` alone. Raises KeyError for an unknown kind."""
    return _MAKERS[kind](_Author(Random(f"{kind}/{seed}"), Random(f"{kind}/{seed}/told {variant}")))


@dataclass
class _Author:
    """Draws words and files, and keeps count of messages. `told` draws what differs between variants."""

    rng: Random
    told: Random
    _count: int = 0
    _taken: set[str] = field(default_factory=set)

    def word(self, rng: Random | None = None) -> str:
        rng = rng or self.rng
        while True:
            parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
            word = "".join(parts) + rng.choice(_CODAS)
            if word not in self._taken:
                self._taken.add(word)
                return word

    def path(self, rng: Random | None = None) -> str:
        return f"{self.word(rng)}.ini"

    def number(self, rng: Random | None = None) -> str:
        return str((rng or self.rng).randrange(1000, 10_000))

    def file(self, key: str, value: str) -> Callable[[str], str]:
        """The file's text as a function of the key's value: everything else is the same in all variants."""
        names = [self.word() for _ in range(self.rng.randint(2, 4))]
        lines = [f"{name} = {self.number()}" for name in names]
        at = self.rng.randint(0, len(lines))
        return lambda said: "\n".join([*lines[:at], f"{key} = {said}", *lines[at:]])

    def id(self) -> str:
        self._count += 1
        return f"s{self._count}"

    def system(self) -> pb.Message:
        return pb.Message(role=pb.ROLE_SYSTEM, content=SYSTEM_PROMPT, message_id=self.id())

    def user(self, text: str) -> pb.Message:
        return pb.Message(role=pb.ROLE_USER, content=text, message_id=self.id())

    def says(self, text: str) -> pb.Message:
        return pb.Message(role=pb.ROLE_ASSISTANT, content=text, message_id=self.id())

    def reads(self, *files: tuple[str, str]) -> list[pb.Message]:
        """One message with the calls, and a result each: (path, content)."""
        calls = [read_call(path, self.id()) for path, _ in files]
        asks = pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=calls, message_id=self.id())
        results = [
            pb.Message(role=pb.ROLE_TOOL, content=content, tool_call_id=call.id, message_id=self.id())
            for call, (_, content) in zip(calls, files, strict=True)
        ]
        return [asks, *results]


CONTEXTS: Final = (40, 301, 700)  # lengths of texts in front of others, in tokens


def text(seed: int, num_tokens: int) -> str:
    """Made-up files, long enough for so many tokens of up to eight characters."""
    author = _Author(Random(f"text/{seed}"), Random(0))
    files: list[str] = []
    while sum(map(len, files)) < 8 * num_tokens:
        files.append(author.file(author.word(), author.number())(author.number()))
    return "\n\n".join(files)


def read_call(path: str, call_id: str = "") -> pb.ToolCall:
    arguments = json.dumps({"path": path}, separators=(",", ":"))
    return pb.ToolCall(id=call_id, name=READ_FILE.name, arguments_json=arguments)


def _asks_two(key: str, path: str, key2: str, path2: str) -> str:
    return f"What is {key} in {path} and {key2} in {path2}?"


def _two_files(author: _Author, kind: str, say: Callable[[str], str], before: tuple[Step, ...] = ()) -> Scene:
    """Two files read by one message; the first result is edited once the second was computed."""
    key, key2, path, path2 = author.word(), author.word(), author.path(), author.path()
    value2 = author.number()
    text, text2 = author.file(key, ""), author.file(key2, value2)
    told = author.number(author.told)
    instead = author.number() if kind == "replaced" else ""
    asks, first, second = author.reads((path, text(say(told))), (path2, text2(value2)))
    question = author.user(_asks_two(key, path, key2, path2))
    edit = SceneEdit(first.message_id, text(say(instead)) if instead else CLEARED)
    steps = (*before, Step((*(() if before else (author.system(),)), question, asks, first, second), (edit,)))
    return Scene(kind, steps, told, instead, rest=f", {value2}")


def _removed(author: _Author) -> Scene:
    return _two_files(author, "removed", str)


def _replaced(author: _Author) -> Scene:
    return _two_files(author, "replaced", str)


def _untouched(author: _Author) -> Scene:
    """A question about one file, after an earlier one whose result is cleared once it was answered."""
    steps = (*_answered(author, 1, author.system()),)
    key, path, told = author.word(), author.path(), author.number(author.told)
    asks, result = author.reads((path, author.file(key, told)(told)))
    last = Step((author.user(f"What is {key} in {path}?"), asks, result))
    return Scene("untouched", (*steps, last), told, told, same_answer=True)


def _answered(author: _Author, count: int, first: pb.Message) -> Iterator[Step]:
    """So many questions with their answers; each result is cleared once its answer was computed."""
    for number in range(count):
        key, path, value = author.word(), author.path(), author.number()
        asks, result = author.reads((path, author.file(key, value)(value)))
        messages = [author.user(f"What is {key} in {path}?"), asks, result, author.says(value)]
        head = [first] if number == 0 else []
        yield Step((*head, *messages), (SceneEdit(result.message_id, CLEARED),))


def _many(author: _Author) -> Scene:
    scene = _two_files(author, "8 edits", str, tuple(_answered(author, 7, author.system())))
    return replace(scene, kind="8 edits")


def _outdated(author: _Author) -> Scene:
    """The file was read before, with another value; it changed and was read again together with another one."""
    key, path, old = author.word(), author.path(), author.number()
    text = author.file(key, old)
    asks, result = author.reads((path, text(old)))
    earlier = Step((author.system(), author.user(f"What is {key} in {path}?"), asks, result, author.says(old)))
    key2, path2, value2 = author.word(), author.path(), author.number()
    told = author.number(author.told)
    again, first, second = author.reads((path, text(told)), (path2, author.file(key2, value2)(value2)))
    question = author.user(_asks_two(key, path, key2, path2))
    step = Step((question, again, first, second), (SceneEdit(first.message_id, CLEARED),))
    return Scene("outdated", (earlier, step), told, old, rest=f", {value2}")


def _pointer(author: _Author, kind: str) -> Scene:
    """The first file says where to look: the next thing to do is a call."""
    key, key2, path, path2 = author.word(), author.word(), author.path(), author.path()
    value2 = author.number()
    text = author.file(key, "")
    other = author.path()  # drawn in any case: the files of all variants are the same
    second_text = author.file(key2, value2)(value2)
    told = author.path(author.told)
    instead = other if kind == "pointer replaced" else ""
    asks, first, second = author.reads((path, text(f"see {told}")), (path2, second_text))
    edit = SceneEdit(first.message_id, text(f"see {instead}") if instead else CLEARED)
    question = author.user(_asks_two(key, path, key2, path2))
    step = Step((author.system(), question, asks, first, second), (edit,))
    return Scene(kind, (step,), told, instead, calls=True)


_MAKERS: Final[dict[str, Callable[[_Author], Scene]]] = {
    "untouched": _untouched,
    "removed": _removed,
    "replaced": _replaced,
    "outdated": _outdated,
    "pointer removed": lambda author: _pointer(author, "pointer removed"),
    "pointer replaced": lambda author: _pointer(author, "pointer replaced"),
    "8 edits": _many,
}
