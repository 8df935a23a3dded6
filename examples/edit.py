"""Edits by hand: amortize, look at the receipt, undo, forget. `python examples/edit.py [HOST:PORT]`"""

from __future__ import annotations

import sys

from leyline_sdk import AppliedEdit, Leyline, Mode, clear, forget

HISTORY = [
    {"role": "system", "content": "You keep notes."},
    {"role": "user", "content": "Note: the meeting is on Monday at nine, in the large room on the second floor."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "My password is hunter2."},
    {"role": "assistant", "content": "You should not tell me."},
    {"role": "user", "content": "What do you have?"},
]


def show(what: str, edit: AppliedEdit) -> None:
    receipt = edit.receipt
    print(
        f"{what}: {receipt.removed} -> {receipt.inserted} tokens, kept {receipt.kept} of which {receipt.turned} moved, "
        f"{receipt.to_compute} to compute, {receipt.freed} slots freed, influence remains: {receipt.influence_remains}"
    )


def main(target: str | None = None) -> None:
    with Leyline(target=target) as client:
        session = client.session(messages=HISTORY)
        session.prefill()
        meeting, password = session.transcript.of_role("user")[:2]

        # AMORTIZE: what follows keeps its rows and only moves. Cheap, and it can be undone.
        edited = session.edit(clear(meeting, "(a meeting)")).applied_edits[0]
        show("amortized", edited)
        print(f"undone: {session.undo(edited.edit_id).restored} tokens are back")

        # FORGET: what follows is computed again, so that no row of the cache comes from what is gone.
        show("forgotten", session.edit(clear(password, "(removed)", mode=Mode.FORGET)).applied_edits[0])

        # First cheaply, later for good.
        edited = session.edit(clear(meeting, "(a meeting)")).applied_edits[0]
        show("and its influence", session.edit(forget(edited.edit_id)).applied_edits[0])
        print(f"{session.prefill().cache}")
        session.close()


if __name__ == "__main__":
    main(*sys.argv[1:2])
