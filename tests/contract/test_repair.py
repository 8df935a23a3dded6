"""What a repair costs, as receipts and reports tell it: the server and the fake count alike."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from tests.contract.scene import Scene


def cut(message_id: str, **fields: Any) -> pb.Directive:
    return pb.Directive(message=pb.MessageTarget(message_id=message_id), **fields)


def behind(scene: Scene, message_id: str) -> int:
    """Tokens behind a message's text."""
    return scene.state.num_tokens - scene.part(message_id, "TEXT")[1]


@pytest.mark.parametrize("first", [0, 3, 1000])
def test_the_first_behind_the_span(scene: Scene, first: int) -> None:
    after = behind(scene, "ra")
    (receipt,) = scene.side.call(scene.edit(cut("ra", repair=pb.Repair(first=first)))).receipts
    again = min(first, after)
    assert (receipt.repaired, receipt.kept, receipt.to_compute) == (again, after - again, again)
    assert receipt.influence_remains == (again < after)
    cache = scene.side.call(scene.edit(prefill=True)).cache
    assert cache.computed + cache.prefix_hit == again


@pytest.mark.parametrize("share", [0.001, 0.25, 1.0])
def test_a_share_of_what_is_behind_the_span(scene: Scene, share: float) -> None:
    after = behind(scene, "ra")
    request = scene.edit(cut("ra", repair=pb.Repair(share=share)), prefill=True)
    answer = scene.side.call(request)
    (receipt,) = answer.receipts
    again = ceil(after * share)
    assert (receipt.repaired, receipt.to_compute) == (again, again)
    assert receipt.kept == (0 if share == 1 else after)
    assert answer.cache.computed + answer.cache.prefix_hit == again
    assert answer.cache.kept == scene.state.num_tokens - again
    assert scene.state.num_pending == 0


def test_a_repair_ends_at_the_next_span_of_the_call(scene: Scene) -> None:
    between = scene.part("rb", "TEXT")[0] - scene.part("ra", "TEXT")[1]
    after = behind(scene, "rb")
    directives = [cut(name, repair=pb.Repair(first=1000)) for name in ("rb", "ra")]
    receipts = scene.side.call(scene.edit(*directives, dry_run=True)).receipts
    assert [receipt.repaired for receipt in receipts] == [after, between]
    (alone, other) = scene.side.call(scene.edit(cut("ra", repair=pb.Repair(first=1000)), cut("rb"))).receipts
    assert (alone.repaired, other.repaired) == (between, 0)


def test_repairs_of_shares_wait_together_for_the_next_request(scene: Scene) -> None:
    after = behind(scene, "rb")
    scene.side.call(scene.edit(cut("rb", repair=pb.Repair(share=0.5))))
    (receipt,) = scene.side.call(scene.edit(cut("says", repair=pb.Repair(first=2)))).receipts
    text = scene.part("says", "TEXT")
    assert text[0] == text[1]
    state = scene.state
    still = after - receipt.removed - 2
    assert receipt.to_compute == 2 + ceil(still / 2)
    assert state.num_pending == 2


def test_what_FORGET_computes_again_needs_no_repair(scene: Scene) -> None:
    forget = cut("ra", mode=pb.MODE_FORGET)
    receipts = scene.side.call(scene.edit(forget, cut("rb", repair=pb.Repair(first=9)))).receipts
    assert [receipt.repaired for receipt in receipts] == [0, 0]
