"""Training rows whose tool outputs are cut out of the KV cache while the session goes on, as AMORTIZE cuts them.

A row holds tokens in the order in which they are computed. The session beside it is a list of entries, as on the
server: an edit takes entries out, what stood behind them keeps its latents and moves, and R is computed next, over what
stands before it. An entry that moved is, to later queries, a second key: the same token, turned by a delta.
"""

from dataclasses import dataclass, field
from random import Random

from tokenizers import Tokenizer

from training.histories import CLEARED
from training.render import BOS, CONTEXT, END, IGNORED, PAD, Message, encode
from training.rows import Shape, random_prompt
from training.tasks import KINDS, SessionMaker
from training.transcripts import transcript

Cut = tuple[int, int, list[int]]
"""The entries [start, end) of the list give way to these ids."""

STYLES = ("cleared", "head", "empty")
STYLE_SHARES = (0.72, 0.14, 0.14)
WAITS = (1, 2, 3, 4, 5, 6, 7)
WAIT_SHARES = (0.5, 0.25, 0.05, 0.05, 0.05, 0.05, 0.05)
"""How many messages behind an output are computed before it is cut. Of two results of one message the first has the
second as its next, so a wait of two is the usual one there: both go once the assistant has spoken."""
RESTING = ("two_files", "two_hops")
"""Kinds whose answer rests on an output that has messages behind it. Without edits they are drawn as often as others;
rows with edits are of them by half and more, for only there does the model learn to note what will be cut."""
NEVER = 2**15 - 1


@dataclass(slots=True)
class Extra:
    """A key that stands a second time: the token `source`, turned by `delta`, for the queries [first, until)."""

    source: int
    delta: int
    first: int
    until: int = NEVER


@dataclass
class EditedRow:
    """T tokens in the order in which they were computed, and the list that is left of them.

    ids, positions, targets, classes: [T]; a target is what the text goes on with (R's tokens have none), `classes` the
    targets' loss classes. Token t is a key to the queries [t, until[t]). `entries`: for each entry of the list the
    token it is, at most T long.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    until: list[int] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    _shown_as: dict[int, Extra] = field(default_factory=dict)
    _last: int | None = None

    def append(self, ids: list[int], classes: list[int]) -> None:
        """The text goes on: these, one or more, are computed at the end of the list."""
        if self._last is not None:
            self.targets[self._last], self.classes[self._last] = ids[0], classes[0]
        self._compute(ids)
        self._last = len(self.ids) - 1
        self.targets[-len(ids) : -1] = ids[1:]
        self.classes[-len(ids) : -1] = classes[1:]

    def num_moved(self, cuts: list[Cut]) -> int:
        """The extra keys that these cuts cost."""
        return len(self.entries) - cuts[0][0] - sum(end - start for start, end, _ in cuts)

    def edit(self, cuts: list[Cut]) -> None:
        """Makes disjoint cuts, ascending, in the coordinates before any of them.

        R sees nothing that stands behind it, so what moved is seen again only once all R before it are computed: until
        then nobody asks for it. So every key is visible to one stretch of queries.
        """
        old, now = self.entries, len(self.ids)
        self.entries = old[: cuts[0][0]]
        for token in old[cuts[0][0] :]:
            shown = self._shown_as.get(token)
            if shown is None:
                self.until[token] = now
            else:
                shown.until = now
        ends = [start for start, _, _ in cuts[1:]] + [len(old)]
        for (_, cut_end, ids), kept_end in zip(cuts, ends, strict=True):
            self._compute(ids)
            kept, first = old[cut_end:kept_end], len(self.ids)
            for position, token in enumerate(kept, len(self.entries)):
                self._shown_as[token] = extra = Extra(token, position - self.positions[token], first)
                self.extras.append(extra)
            self.entries += kept

    def _compute(self, ids: list[int]) -> None:
        count, computed, listed = len(ids), len(self.ids), len(self.entries)
        self.positions += range(listed, listed + count)
        self.entries += range(computed, computed + count)
        self.ids += ids
        self.targets += [PAD] * count
        self.classes += [IGNORED] * count
        self.until += [NEVER] * count


def num_extras(shape: Shape) -> int:
    """E, the extra keys that a row of this shape has room for: a multiple of 8, as attention masks like to be."""
    return shape.length // 16 * 8


def weighted(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Those that rest on what may be cut three times, the others once."""
    return kinds + 2 * tuple(kind for kind in kinds if kind in RESTING)


def make_edited_row(rng: Random, tokenizer: Tokenizer, shape: Shape, kinds: tuple[str, ...] = KINDS) -> EditedRow:
    """One session of at least `shape.length` computed tokens, with at most `num_extras(shape)` extra keys.

    Whoever cuts the row to its length drops extras that are first seen beyond: no key looks ahead.
    """
    maker = SessionMaker(rng, heldout=False, kinds=weighted(kinds))
    disk: dict[str, str] = {}
    prompt, tools = random_prompt(rng)
    cutter = Cutter(rng, tokenizer, num_extras(shape))
    row = EditedRow()
    row.append([BOS], [CONTEXT])
    row.append(*encode([Message("system", prompt)], tokenizer, tools))
    while len(row.ids) < shape.length:
        for message in transcript(maker.next_task(), disk):
            ids, classes = encode([message], tokenizer, tools)
            if message.role == "tool":
                cutter.plan(row, message, ids)
            # The token that ends a generated message is pending on the server until something follows it.
            num_pending = int(message.role == "assistant")
            computed = len(ids) - num_pending
            row.append(ids[:computed], classes[:computed])
            cutter.cut_what_is_due(row)
            if num_pending:
                row.append(ids[computed:], classes[computed:])
    return row


@dataclass
class Planned:
    """An output that will be cut: the token its content starts with, its length, R, and messages still to wait for."""

    first: int
    length: int
    replacement: list[int]
    wait: int


class Cutter:
    """Decides which outputs of a row are cut, when, and what comes instead: in one style, as one policy would."""

    def __init__(self, rng: Random, tokenizer: Tokenizer, room: int) -> None:
        self.rng = rng
        self.tokenizer = tokenizer
        self.room = room
        self.style = rng.choices(STYLES, STYLE_SHARES)[0]
        self.share = 1.0 if rng.random() < 0.5 else rng.uniform(0.1, 0.9)
        self._planned: list[Planned] = []
        self._unplanned = 0

    def plan(self, row: EditedRow, message: Message, ids: list[int]) -> None:
        """Perhaps plans to cut the content of a tool message: all between its marker and its `<|end|>`.

        row: before the message was computed; ids: the message's.
        """
        assert ids[-1] == END
        # A row that is lost to edits for lack of luck would be an ordinary one: the fourth output goes at the latest.
        if self.rng.random() >= self.share and not (self._unplanned == 3 and not row.extras):
            self._unplanned += 1
            return
        # The output itself is the first message that is computed from here on.
        wait = 1 + self.rng.choices(WAITS, WAIT_SHARES)[0]
        replacement = self.tokenizer.encode(self._replacement(message.content), add_special_tokens=False).ids
        self._planned.append(Planned(len(row.ids) + 1, len(ids) - 2, replacement, wait))

    def cut_what_is_due(self, row: EditedRow) -> None:
        """One message more was computed: cuts all that has waited long enough, if its extra keys still fit."""
        for planned in self._planned:
            planned.wait -= 1
        due = [planned for planned in self._planned if planned.wait <= 0 and planned.length]
        self._planned = [planned for planned in self._planned if planned.wait > 0]
        starts = [(row.entries.index(planned.first), planned) for planned in due]
        cuts = [(start, start + planned.length, planned.replacement) for start, planned in starts]
        cuts.sort(key=lambda cut: cut[0])
        if cuts and row.num_moved(cuts) <= self.room:
            self.room -= row.num_moved(cuts)
            row.edit(cuts)

    def _replacement(self, content: str) -> str:
        if self.style == "head":
            return content[: self.rng.randint(4, 40)] + self.rng.choice(("", " ", "\n")) + CLEARED
        return CLEARED if self.style == "cleared" else ""
