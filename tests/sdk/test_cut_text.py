"""Cuts by characters: by hand, by policies that see each other's, and in more directives than a call may have."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Compose, KeepLast, Redact
from leyline_sdk import Edit, Policy, PolicyContext, Session, clear, cut_content, cut_text, errors, rerender
from leyline_sdk.mode import Mode
from leyline_sdk.testing import FakeServer, Say, call
from leyline_sdk.text_cuts import TextCut, cut, then


def with_result(text: str, **limits: int) -> Session:
    fake = FakeServer([Say("", "why sk-1 so", (call("read"),)), "ok", "ok"], **limits)  # type: ignore[arg-type]
    session = fake.client().session("s", system="be good", messages=["the task"])
    (wanted,) = session.complete().tool_calls
    session.tool_result(wanted, text)
    return session


def result(session: Session) -> str:
    mirrored = session.transcript.of_role("tool")[0]
    session.refresh()
    assert session.transcript.of_role("tool")[0].text == mirrored.text
    return mirrored.text


class Plans(Policy):
    """These characters of the result, told of what it sees."""

    def __init__(self, *cuts: tuple[int, int, str], mode: Mode = Mode.AMORTIZE) -> None:
        self.cuts, self.mode, self.saw = cuts, mode, ""

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        message = context.tool_results[0]
        if message.edited and not any(m == "planned" for m in message.edit_ids):
            return []
        self.saw = message.text
        return [cut_text(message, *one, mode=self.mode) for one in self.cuts]


def test_by_hand_in_the_text_before_the_call() -> None:
    session = with_result("0123456789 é🙂x")
    message = session.transcript.of_role("tool")[0]
    done = session.edit(cut_text(message, 8, 10, "B"), cut_text(message, 12, 13, ""), cut_text(message, 0, 2, "AAA"))
    assert [edit.removed for edit in done.applied_edits] == [2, 4, 2]
    assert result(session) == "AAA234567B éx"
    session.edit(cut_text(message.id))
    assert result(session) == ""
    session.edit(cut_text(message.id, replacement="again"))
    assert result(session) == "again"
    said = session.transcript.of_role("assistant")[0]
    session.edit(cut_text(said, 4, 8, "*", part="reasoning", mode=Mode.FORGET))
    assert session.transcript.of_role("assistant")[0].reasoning == "why * so"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda m: [cut_text(m, 3, 11)], errors.SpanOutOfRange),
        (lambda m: [cut_text(m, 3, 2)], errors.SpanOutOfRange),
        (lambda m: [cut_text(m, -1, 2)], errors.SpanOutOfRange),
        (lambda m: [cut_text(m, 1, 4), cut_text(m, 3, 5)], errors.SpansOverlap),
        (lambda m: [cut_text(m, 3, 3, "a"), cut_text(m, 3, 3, "b")], errors.SpansOverlap),
        (lambda m: [cut_text(m, 1, 4), cut_content(m, 3, 5)], errors.SpansOverlap),
        (lambda m: [cut_text(m, 1, 4, [7])], errors.InvalidArgument),
        (lambda m: [cut_text("none", 1, 4)], errors.UnknownMessage),
    ],
)
def test_refused(make, error) -> None:  # type: ignore[no-untyped-def]
    session = with_result("0123456789")
    with pytest.raises(error):
        session.edit(*make(session.transcript.of_role("tool")[0]))
    assert result(session) == "0123456789"


def test_later_policies_see_and_cut_what_earlier_ones_left() -> None:
    session = with_result("one two three")
    first, second = Plans((0, 3, "1"), (8, 13, "3")), Plans((0, 1, "uno"), (2, 5, "TWO"), mode=Mode.FORGET)
    last = Plans((3, 8, "-"))
    session.policies[:] = [first, second, last]
    done = session.prefill()
    assert (first.saw, second.saw, last.saw) == ("one two three", "1 two 3", "uno TWO 3")
    assert result(session) == "uno-3"
    assert {edit.receipt.mode for edit in done.applied_edits} == {Mode.FORGET, Mode.AMORTIZE}


def test_a_cut_of_a_text_that_is_new_itself() -> None:
    class Clears(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            return [clear(m, "see sk-7") for m in context.tool_results if m.text[0] == "a"]

    class Renders(Policy):
        def plan(self, context: PolicyContext) -> Iterable[Edit]:
            return [rerender(m, {**m.to_dict(), "content": "see sk-7"}) for m in context.tool_results if not m.edited]

    for policy in (Clears(), Renders(), Compose([Clears()])):
        session = with_result("a long result with sk-12")
        session.policies[:] = [policy, Redact(r"sk-\d+", "*")]
        (edit,) = (e for e in session.prefill().applied_edits if "tool" in _roles(session, e.message_ids))
        assert result(session) == "see *"
        assert edit.receipt.mode is Mode.FORGET
    session = with_result("a long result with sk-12")
    session.policies[:] = [Redact(r"sk-\d+", "*"), Clears()]
    session.prefill()
    assert result(session) == "see sk-7"


def _roles(session: Session, ids: Iterable[str]) -> set[str]:
    return {message.role for message in session.transcript if message.id in ids}


def test_more_matches_than_a_call_may_have_directives() -> None:
    session = with_result("é1 " * 50, max_directives=7)
    session.policies[:] = [Redact(r"\d", "##"), KeepLast(1)]
    session.complete()
    assert result(session) == "é## " * 50
    assert not session.prefill().applied_edits


def test_a_result_longer_than_any_r() -> None:
    text = "x" * 4300
    session = with_result(f"{text}sk-12345é")
    session.prefill()
    session.policies[:] = [Redact(r"sk-\d{2,}")]
    (edit,) = session.prefill().applied_edits
    assert (edit.removed, edit.inserted) == (8, len("[redacted]"))
    assert result(session) == f"{text}[redacted]é"
    session.complete()


@pytest.mark.parametrize("cuts", [[(0, 3, "a"), (2, 4, "b")], [(0, 99, "")], [(5, 2, "")]])
def test_a_policy_may_not_cut_what_is_not_there_or_twice(cuts: list[tuple[int, int, str]]) -> None:
    session = with_result("0123456789")
    session.policies[:] = [Plans(*cuts)]
    with pytest.raises(errors.PolicyError, match="cuts characters"):
        session.complete()


@st.composite
def cuts_of(draw: st.DrawFn, length: int) -> list[TextCut]:
    out: list[TextCut] = []
    ends = sorted(draw(st.lists(st.integers(0, length), max_size=6)))
    for start, end in zip(ends[::2], ends[1::2], strict=False):
        text = draw(st.text("XYZ", max_size=3))
        if (start < end or text) and not (out and start == end == out[-1].start):
            out.append(TextCut(start, end, text))
    return out


@given(st.data())
def test_cuts_after_cuts_are_cuts_of_the_text_before(data: st.DataObject) -> None:
    text = "abcdefghij"
    first = data.draw(cuts_of(len(text)))
    between = cut(text, first)
    second = data.draw(cuts_of(len(between)))
    both = then(first, second)
    assert cut(text, both) == cut(between, second)
    ordered = sorted(both, key=lambda c: (c.start, c.end))
    assert all(a.end <= b.start for a, b in pairwise(ordered))
