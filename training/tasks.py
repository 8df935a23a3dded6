"""Sessions of file-reading tasks: what is asked, which files exist, what the answer is. No tokens, no torch.

A driver makes `session = make_session(Random(0), num_tasks=8)` and, for each task in `session.tasks`, writes
`task.files`, asks `task.question`, lets the first read fail with `task.fail_first` where that is set, and compares the
reply with `task.answer`.
"""

from dataclasses import dataclass, field
from random import Random

from training.words import WordMaker

KINDS = ("one_hop", "multi_hop", "reread", "retry", "two_files")
ALL_KINDS = (*KINDS, "two_hops")
"""With the kind whose answer needs an output that has one or two messages after it: drawn where it is asked for."""

ASK_ONE = [
    "What is {key} in {path}?",
    "What is {key} in {path}?",
    "What is {key} in {path}?",
    "Tell me {key} in {path}.",
    "Look up {key} in {path}.",
    "Read {path}: what is {key}?",
    "I need {key} in {path}.",
]
ASK_AGAIN = [
    "What is {key} in {path} now?",
    "{path} changed. What is {key}?",
    "{path} was edited. What is {key} in {path}?",
    "Read {path} again: what is {key}?",
]
ASK_TWO = [
    "What is {key} in {path} and {key2} in {path2}?",
    "What is {key} in {path} and {key2} in {path2}?",
    "Tell me {key} in {path} and {key2} in {path2}.",
    "Look up {key} in {path} and {key2} in {path2}.",
]
BUSY = "error: busy, try again"
MISSING = "error: no such file, did you mean {path}"


@dataclass(frozen=True)
class Task:
    """One question and everything needed to run and judge it."""

    kind: str
    question: str
    answer: str
    files: dict[str, str]
    """Files to write before the question is asked: path -> content. A reread's file replaces its older content."""
    fail_first: str | None = None
    """What the first read of this task returns instead of the file."""
    reads: tuple[tuple[str, ...], ...] = ()
    """The paths an ideal agent reads, one tuple for each assistant message with calls."""


@dataclass(frozen=True)
class Session:
    """Tasks to be asked one after the other in one conversation."""

    tasks: tuple[Task, ...]


@dataclass
class SessionMaker:
    """Makes the tasks of one session one by one; paths are unique in it, except for rereads.

    `easy` keeps files short, as the trainer does at first; `kinds` are those that are drawn where none is asked for.
    """

    rng: Random
    heldout: bool = True
    easy: bool = False
    kinds: tuple[str, ...] = KINDS
    _words: WordMaker = field(init=False)
    _paths: set[str] = field(init=False, default_factory=set)
    _keys: list[str] = field(init=False, default_factory=list)
    _readable: dict[str, str] = field(init=False, default_factory=dict)
    """Files whose asked key had its value in them, path -> that key: what a reread may ask for."""

    def __post_init__(self) -> None:
        self._words = WordMaker(self.rng, self.heldout)

    def next_task(self, kind: str | None = None) -> Task:
        """A task of the given or a random kind; a reread needs an earlier task and is a one_hop where there is none."""
        kind = kind or self.rng.choice(self.kinds)
        if kind == "reread" and not self._readable:
            kind = "one_hop"
        return getattr(self, f"_{kind}")()

    def _one_hop(self) -> Task:
        path, key, value = self._new_path(), self._new_key(), self._words.value()
        self._readable[path] = key
        question = self.rng.choice(ASK_ONE).format(key=key, path=path)
        return Task("one_hop", question, value, {path: self._content({key: value})}, reads=((path,),))

    def _multi_hop(self) -> Task:
        paths = [self._new_path() for _ in range(self.rng.choice((2, 2, 3)))]
        key, value = self._new_key(), self._words.value()
        says = [f"see {target}" for target in paths[1:]] + [value]
        files = {path: self._content({key: said}) for path, said in zip(paths, says, strict=True)}
        self._readable[paths[-1]] = key
        question = self.rng.choice(ASK_ONE).format(key=key, path=paths[0])
        return Task("multi_hop", question, value, files, reads=tuple((path,) for path in paths))

    def _reread(self) -> Task:
        path = self.rng.choice(list(self._readable))
        key = self._readable[path] if self.rng.random() < 0.75 else self._new_key()
        value = self._words.value()
        question = self.rng.choice(ASK_AGAIN).format(key=key, path=path)
        return Task("reread", question, value, {path: self._content({key: value})}, reads=((path,),))

    def _retry(self) -> Task:
        path, key, value = self._new_path(), self._new_key(), self._words.value()
        self._readable[path] = key
        asked, error = path, BUSY
        if self.rng.random() < 0.3:
            asked, error = self._new_path(), MISSING.format(path=path)
        question = self.rng.choice(ASK_ONE).format(key=key, path=asked)
        files = {path: self._content({key: value})}
        return Task("retry", question, value, files, fail_first=error, reads=((asked,), (path,)))

    def _two_files(self) -> Task:
        path, path2 = self._new_path(), self._new_path()
        key, key2 = self._new_key(), self._new_key()
        value, value2 = self._words.value(), self._words.value()
        self._readable |= {path: key, path2: key2}
        question = self.rng.choice(ASK_TWO).format(key=key, path=path, key2=key2, path2=path2)
        files = {path: self._content({key: value}), path2: self._content({key2: value2})}
        return Task("two_files", question, f"{value}, {value2}", files, reads=((path, path2),))

    def _two_hops(self) -> Task:
        path, path2, target = self._new_path(), self._new_path(), self._new_path()
        key, key2 = self._new_key(), self._new_key()
        value, value2 = self._words.value(), self._words.value()
        question = self.rng.choice(ASK_TWO).format(key=key, path=path, key2=key2, path2=path2)
        if self.rng.random() < 0.5:
            asked, says, known = key, {path: {key: f"see {target}"}, path2: {key2: value2}}, {path2: key2}
            found = value
        else:
            asked, says, known = key2, {path: {key: value}, path2: {key2: f"see {target}"}}, {path: key}
            found = value2
        self._readable |= {**known, target: asked}
        files = {name: self._content(entries) for name, entries in {**says, target: {asked: found}}.items()}
        return Task("two_hops", question, f"{value}, {value2}", files, reads=((path, path2), (target,)))

    def _new_path(self) -> str:
        while (path := self._words.path()) in self._paths:
            pass
        self._paths.add(path)
        return path

    def _new_key(self) -> str:
        # The same key in several files of a session: the answer must come from the file that was asked for.
        if self._keys and self.rng.random() < 0.25:
            return self.rng.choice(self._keys)
        self._keys.append(self._words.key())
        return self._keys[-1]

    def _content(self, entries: dict[str, str]) -> str:
        """A file with the given entries among others that nobody asks for."""
        rng = self.rng
        entries = dict(entries)
        num_lines = self._num_lines()
        while len(entries) < num_lines:
            value = f"see {self._words.path()}" if rng.random() < 0.04 else self._words.value()
            entries.setdefault(self._words.key(), value)
        lines = [f"{key} = {value}" for key, value in entries.items()]
        rng.shuffle(lines)
        if rng.random() < 0.15:
            lines.insert(0, f"[{self._words.stem()}]")
        return "\n".join(lines) + rng.choice(("", "\n"))

    def _num_lines(self) -> int:
        draw = self.rng.random()
        if self.easy:
            return self.rng.randint(2, 4)
        if draw < 0.88:
            return self.rng.randint(3, 7)
        return self.rng.randint(8, 16)


def make_session(rng: Random, num_tasks: int, heldout: bool = True, kinds: tuple[str, ...] = KINDS) -> Session:
    """A session of random kinds out of `kinds`; with `heldout`, no stem, key or value in it can occur in training."""
    maker = SessionMaker(rng, heldout, kinds=kinds)
    return Session(tuple(maker.next_task() for _ in range(num_tasks)))
