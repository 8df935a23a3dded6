"""The list that the picture follows, against receipts and reports as a server would give them."""

from __future__ import annotations

from demo.cells import LiveList
from leyline_sdk import AppliedEdit, FinishReason, Mode, Receipt, Reply, Usage
from leyline_sdk.reports import CacheReport


def reply(context: int, generated: int, prefix_hit: int = 0) -> Reply:
    usage = Usage(context, 0, 0, generated, 1.0, 1.0, 0.0)
    cache = CacheReport(prefix_hit, 0, 0, 0, 0, None, "APPEND")
    return Reply("", "", (), (), FinishReason.STOP, (), usage, cache, "m1")


def edit(at: int, removed: int, inserted: int, mode: Mode = Mode.AMORTIZE) -> AppliedEdit:
    shift = inserted - removed
    receipt = Receipt("e1", mode, at, removed, inserted, shift, 0, 0, 0, 0, 0, False, (), (), "")
    return AppliedEdit("p", ("m0",), receipt)


def test_first_turn_computes_everything() -> None:
    assert LiveList().turn([], reply(10, 3)) == (("computed", 13),)


def test_later_turns_compute_what_is_new_and_the_last_sampled_token() -> None:
    followed = LiveList()
    followed.turn([], reply(10, 3))
    assert followed.turn([], reply(15, 2)) == (("kept", 12), ("computed", 5))


def test_amortize_turns_what_follows() -> None:
    followed = LiveList()
    followed.turn([], reply(10, 3))
    row = followed.turn([edit(4, 5, 1)], reply(12, 1))
    assert row == (("kept", 4), ("removed", 5), ("computed", 1), ("turned", 3), ("computed", 5))


def test_forget_computes_what_follows() -> None:
    followed = LiveList()
    followed.turn([], reply(10, 3))
    row = followed.turn([edit(4, 5, 1, Mode.FORGET)], reply(12, 1))
    assert row == (("kept", 4), ("removed", 5), ("computed", 9))


def test_several_edits_in_the_final_coordinates() -> None:
    followed = LiveList()
    followed.turn([], reply(20, 1))
    row = followed.turn([edit(6, 4, 1), edit(2, 4, 1)], reply(16, 1))
    kinds = [kind for kind, _ in row]
    assert kinds == ["kept", "removed", "computed", "turned", "removed", "computed", "turned", "computed"]
    assert sum(count for kind, count in row if kind == "removed") == 8


def test_prefix_hits_count_as_kept() -> None:
    assert LiveList().turn([], reply(10, 1, prefix_hit=6)) == (("kept", 6), ("computed", 5))
