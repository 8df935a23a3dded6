"""What a user annotates and reads: every value that a call returns is exported, and `help` tells of each attribute."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

import leyline_sdk
from leyline_sdk import AsyncLeyline, AsyncSession, Leyline, Reply, Session, Stream, reports, types
from leyline_sdk.testing import FakeServer, call

VALUES = [
    value
    for module in (types, reports)
    for value in vars(module).values()
    if is_dataclass(value) and value.__module__ == module.__name__
]


def classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and hint.__module__.startswith("leyline_sdk"):
        yield hint
    for part in get_args(hint):
        yield from classes_in(part)


def test_what_calls_return_is_exported() -> None:
    seen: set[type] = set()
    todo = [Reply, Stream]
    for owner in (Leyline, Session):
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_"):
                todo += classes_in(get_type_hints(method)["return"])
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += [other for hint in get_type_hints(one).values() for other in classes_in(hint)]
    assert {reports.PoolStats, reports.Limits, types.EditInfo, types.UndoResult, reports.CacheReport} <= seen
    for one in seen:
        assert getattr(leyline_sdk, one.__name__, None) is one, f"{one.__name__} is not exported"


def test_all_that_is_exported_is_there() -> None:
    assert sorted(set(leyline_sdk.__all__)) == sorted(leyline_sdk.__all__)
    for name in leyline_sdk.__all__:
        assert getattr(leyline_sdk, name) is not None


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_help_tells_of_every_attribute(value: type) -> None:
    text = inspect.getdoc(value) or ""
    for attribute in fields(value):  # type: ignore[arg-type]
        assert f"\n    {attribute.name}: " in text, f"{value.__name__}.{attribute.name}"


@pytest.mark.parametrize(("plain", "twin"), [(Session, AsyncSession), (Leyline, AsyncLeyline)])
def test_twins_take_the_same(plain: type, twin: type) -> None:
    for name, method in inspect.getmembers(plain, inspect.isfunction):
        if not name.startswith("_"):
            theirs = inspect.signature(getattr(twin, name))
            assert list(theirs.parameters.values()) == list(inspect.signature(method).parameters.values()), name


def test_the_examples_policy_clears_what_another_one_touched() -> None:
    from examples.custom_policy import ShortLogs
    from leyline_policies import Redact

    session = FakeServer([call("tail"), "done", "ok"]).client().session("s", policies=[Redact(r"sk-\w+")])
    session.append("the task")
    (tail,) = session.complete().tool_calls
    session.append_results({tail.id: "key sk-abcdef in a log that is long enough to be cleared"})
    session.complete()
    session.append("the next question")
    (result,) = session.transcript.of_role("tool")
    assert result.edited
    assert "sk-" not in result.text
    session.policies.append(ShortLogs())
    session.prefill()
    assert [message.text for message in session.transcript.of_role("tool")] == ["[log]"]
    assert session.preview().applied_edits == ()
