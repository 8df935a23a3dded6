"""Cuts of a text by characters, and the same cuts told of the text that they started from. Pure.

text    a b c d e f          [1, 3) -> X         a X d e f
then    a X d e f            [1, 3) -> Y         a Y e f
both    a b c d e f          [1, 4) -> Y
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextCut:
    """Characters [start, end) give way to `text`."""

    start: int
    end: int
    text: str

    @property
    def growth(self) -> int:
        return len(self.text) - (self.end - self.start)

    def of(self, text: str) -> str:
        return text[: self.start] + self.text + text[self.end :]


def cut(text: str, cuts: Iterable[TextCut]) -> str:
    """The text after cuts that are disjoint, all told of `text`."""
    for one in sorted(cuts, key=lambda c: (c.start, c.end), reverse=True):
        text = one.of(text)
    return text


def told_before(cuts: Sequence[TextCut], new: TextCut) -> tuple[TextCut, list[TextCut]]:
    """`new`, told of the text after `cuts`, as a cut of the text before them; and those of `cuts` that are in it now.

    `cuts` are disjoint, in any order, all told of the text before.
    """
    shift = 0  # of what stands after the cuts so far
    inside: list[tuple[TextCut, int]] = []  # with the shift of what stands before each
    before = 0  # the shift of what stands before `new`
    for old in sorted(cuts, key=lambda c: (c.start, c.end)):
        low = old.start + shift
        high = low + len(old.text)
        same_place = new.start == new.end and old.start == old.end and low <= new.start <= high
        if same_place or (low < new.end and new.start < high):
            inside.append((old, shift))
        elif high <= new.start:
            before = shift + old.growth
        else:
            break
        shift += old.growth
    if not inside:
        return TextCut(new.start - before, new.end - before, new.text), []
    first, moved = inside[0]
    starts_in = new.start >= first.start + moved
    start = first.start if starts_in else new.start - moved
    head = first.text[: new.start - first.start - moved] if starts_in else ""
    last, moved = inside[-1]
    ends_in = new.end <= last.start + moved + len(last.text)
    end = last.end if ends_in else new.end - moved - last.growth
    tail = last.text[new.end - last.start - moved :] if ends_in else ""
    return TextCut(start, end, head + new.text + tail), [old for old, _ in inside]


def then(cuts: Sequence[TextCut], later: Iterable[TextCut]) -> list[TextCut]:
    """The cuts of the text before that do what `cuts` and then `later` do; `later` is told of the text after `cuts`."""
    out = list(cuts)
    for one in sorted(later, key=lambda c: (c.start, c.end), reverse=True):
        joined, inside = told_before(out, one)
        out = [*(old for old in out if old not in inside), joined]
    return out
