"""Edits undone in any order that is allowed give the text that was there, to the token. On the rules that both sides
share, through the fake."""

from __future__ import annotations

from random import Random

import pytest

from leyline_sdk import LeylineError, Session, edits, errors
from leyline_sdk.testing import FakeServer


def edit_at_random(session: Session, random: Random) -> None:
    length = session.transcript.num_tokens
    start = random.randint(4, length)
    end = random.randint(start, min(length, start + 5))
    wanted = [edits.remove_span(start, end, "" if random.random() < 0.4 else "R" * random.randint(1, 4))]
    if random.random() < 0.3 and end + 1 < length:
        wanted.append(edits.remove_span(end, min(length, end + 2)))
    session.edit(*wanted)


def undo_at_random(session: Session, random: Random) -> bool:
    undoable = [entry.edit_id for entry in session.info().edits if entry.undoable]
    if undoable:
        session.undo(random.choice(undoable))
    return bool(undoable)


@pytest.mark.parametrize("block", range(6))
def test_undoing_everything_gives_the_first_text(block: int) -> None:
    whole = 0
    for seed in range(block * 25, block * 25 + 25):
        random = Random(seed)
        session = FakeServer().client().session()
        for _ in range(random.randint(1, 3)):
            text = "".join(random.choice("abcdefghij") for _ in range(random.randint(6, 14)))
            session.append_text(text) if random.random() < 0.6 else session.append(text)
        before = session.info(token_ids=True).token_ids
        for _ in range(random.randint(2, 6)):
            try:
                edit_at_random(session, random)
            except errors.InvalidDirective:
                continue  # through a marker
        try:
            while undo_at_random(session, random):
                pass
        except LeylineError as error:
            # Whole messages without a role, parted by what was inserted where they stood.
            if "stands in the session already" not in str(error):
                raise
            continue
        if all(entry.undone for entry in session.info().edits):
            whole += 1
            assert session.info(token_ids=True).token_ids == before
    assert whole > 15


def test_an_r_cut_beside_an_earlier_cut_is_whole_again_only_after_both() -> None:
    session = FakeServer().client().session()
    session.append("01234567890123456789")
    start = session.transcript.messages[0].start + 10
    first = session.edit(edits.remove_span(start, start + 3, "555555")).applied_edits[0].edit_id
    second = session.edit(edits.remove_span(start, start + 2)).applied_edits[0].edit_id
    third = session.edit(edits.remove_span(start, start + 2)).applied_edits[0].edit_id
    session.undo(second)
    with pytest.raises(LeylineError, match=third):
        session.undo(first)
    session.undo(third)
    session.undo(first)
    session.refresh()
    assert session.transcript.messages[0].text == "01234567890123456789"


def test_a_pair_that_went_in_one_call_comes_back_in_one_undo() -> None:
    session = FakeServer().client().session()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    session.append([{"role": "user", "content": "Hi, what is it?"}, {"role": "assistant", "tool_calls": [call]}])
    session.append_results({"c1": "a result"})
    before = session.info(token_ids=True).token_ids
    asked, result = session.transcript.messages[1:]
    version = session.edit(edits.remove(asked), edits.remove(result)).applied_edits[0].edit_id.partition(".")[0]
    with pytest.raises(LeylineError, match="tool call"):
        session.undo(f"{version}.1")
    session.undo(version)
    assert session.info(token_ids=True).token_ids == before
