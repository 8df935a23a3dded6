"""Arguments of the wrong type are refused by name, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leyline_policies import KeepLast
from leyline_sdk import Leyline, Policy, Session, errors
from leyline_sdk.testing import FakeServer


class PlansNothing(Policy):
    def plan(self, context: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda s: s.tool_result("c", None), "content"),
        (lambda s: s.tool_result("c", {"a": 1}), "content"),
        (lambda s: s.append(None), "messages"),
        (lambda s: s.append_results(["x"]), "results"),
        (lambda s: s.generate(max_tokens="96"), "max_tokens"),
        (lambda s: s.edit("x"), "edits"),
    ],
)
def test_named_field(act: Callable[[Session], Any], field: str) -> None:
    session = FakeServer().client().session("s", messages=["hi"])
    with pytest.raises(errors.InvalidArgument) as caught:
        act(session)
    assert caught.value.field == field


@pytest.mark.parametrize("policies", [[KeepLast], ["KeepLast"], KeepLast(1), 7])
def test_what_is_no_policy(policies: Any) -> None:
    with pytest.raises(errors.ConfigError, match="polic"):
        FakeServer().client().session("s", policies=policies)


def test_a_plan_of_none() -> None:
    session = FakeServer().client().session("s", messages=["hi"], policies=[PlansNothing()])
    with pytest.raises(errors.PolicyError, match="plan must return edits"):
        session.complete()


def test_a_target_with_a_scheme() -> None:
    with pytest.raises(errors.ConfigError, match="host:port, no scheme"):
        Leyline(target="http://localhost:50051")
