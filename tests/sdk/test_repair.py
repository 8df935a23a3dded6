"""Repair in the SDK: a mode like the others, checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from leyline_policies import KeepLast, Redact
from leyline_sdk import Edit, Leyline, Mode, Policy, PolicyContext, Repair, clear, errors
from leyline_sdk.mode import EditMode, stronger
from leyline_sdk.testing import FakeServer


@pytest.mark.parametrize(
    "bad",
    [{}, {"first": 1, "share": 0.5}, {"first": -1}, {"first": True}, {"first": 1.5}, {"share": 0}, {"share": 1.1}],
)
def test_bad_amounts_are_refused_when_written(bad: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=r"first|share"):
        Repair(**bad)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Mode.AMORTIZE, Mode.AMORTIZE, Mode.AMORTIZE),
        (Mode.AMORTIZE, Repair(first=3), Repair(first=3)),
        (Repair(share=0.1), Mode.FORGET, Mode.FORGET),
        (Repair(first=3), Repair(first=9), Repair(first=9)),
        (Repair(share=0.3), Repair(share=0.2), Repair(share=0.3)),
        (Repair(first=3), Repair(share=0.2), Repair(share=1.0)),
    ],
)
def test_of_two_modes_the_stronger(one: EditMode, other: EditMode, both: EditMode) -> None:
    assert stronger(one, other) == stronger(other, one) == both


class ClearAll(Policy):
    def __init__(self, mode: EditMode) -> None:
        self.mode = mode

    def plan(self, context: PolicyContext) -> list[Edit]:
        return [clear(message, mode=self.mode) for message in context.editable if message.role == "assistant"]


def session(client: Leyline, *policies: Policy) -> Any:
    live = client.session(system="be brief", policies=list(policies))
    live.append(["one", {"role": "assistant", "content": "an answer"}, "two"], prefill=True)
    return live


def test_an_edit_by_hand_says_what_it_repairs() -> None:
    with FakeServer().client() as client:
        live = session(client)
        answer = live.transcript.of_role("assistant")[0]
        applied = live.edit(clear(answer, mode=Repair(first=4)))
        (edit,) = applied.applied_edits
        assert edit.receipt.mode is Mode.AMORTIZE
        assert (edit.receipt.repaired, edit.receipt.to_compute) == (4, 4)


def test_policies_take_a_repair_for_a_mode() -> None:
    KeepLast(3, mode=Repair(first=16))
    Redact("sk-", mode=Repair(share=1.0))
    with pytest.raises(errors.ConfigError, match="Repair"):
        KeepLast(3, mode="repair")  # type: ignore[arg-type]
    with FakeServer().client() as client:
        live = session(client, ClearAll(Repair(share=0.5)), ClearAll(Repair(share=0.9)))
        reply = live.complete(max_tokens=4)
        (edit,) = reply.applied_edits
        assert edit.receipt.repaired > 0
        assert reply.cache.computed >= edit.receipt.repaired
