"""Generates that the contract refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from leyline_proto import leyline_pb2 as pb
from tests.contract.scene import Scene
from tests.contract.sides import BOUNDS, Side

CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "no tokens": ({"max_tokens": 0}, "INVALID_ARGUMENT", {"field": "max_tokens", "value": 0}),
    "fewer than no tokens": ({"max_tokens": -5}, "INVALID_ARGUMENT", {"field": "max_tokens", "value": -5}),
    "cold": ({"sampling": pb.Sampling(temperature=-0.1)}, "INVALID_ARGUMENT", {"field": "temperature"}),
    "hot": (
        {"sampling": pb.Sampling(temperature=101)},
        "INVALID_ARGUMENT",
        {"field": "temperature", "bound": "in [0, 100]"},
    ),
    "a temperature that is no number": (
        {"sampling": pb.Sampling(temperature=math.nan)},
        "INVALID_ARGUMENT",
        {"field": "temperature"},
    ),
    "an infinite temperature": (
        {"sampling": pb.Sampling(temperature=math.inf)},
        "INVALID_ARGUMENT",
        {"field": "temperature"},
    ),
    "top_p of nothing": ({"sampling": pb.Sampling(top_p=0)}, "INVALID_ARGUMENT", {"field": "top_p"}),
    "top_p above one": ({"sampling": pb.Sampling(top_p=1.01)}, "INVALID_ARGUMENT", {"field": "top_p"}),
    "a top_p that is no number": ({"sampling": pb.Sampling(top_p=math.nan)}, "INVALID_ARGUMENT", {"field": "top_p"}),
    "top_k of nothing": (
        {"sampling": pb.Sampling(top_k=0)},
        "INVALID_ARGUMENT",
        {"field": "top_k", "bound": "at least 1"},
    ),
    "an empty stop string": ({"stop": ["x", ""]}, "INVALID_ARGUMENT", {"field": "stop"}),
    "many stop strings": ({"stop": ["x"] * 17}, "TOO_LONG", {"value": 17, "limit": 16}),
    "a long stop string": ({"stop": ["x" * 1025]}, "TOO_LONG", {"value": 1025, "limit": 1024}),
    "a negative stop id": ({"stop_token_ids": [-1]}, "TOKEN_OUT_OF_RANGE", {"value": -1}),
    "a forced id outside the vocabulary": ({"force_token_ids": [1 << 30]}, "TOKEN_OUT_OF_RANGE", {"value": 1 << 30}),
    "constrained output": ({"constraint": "json"}, "NOT_SUPPORTED", {"feature": "CONSTRAINED_OUTPUT"}),
    "more than the context": ({"max_tokens": 500}, "CONTEXT_EXCEEDED", {"limit": BOUNDS["max_context"]}),
    "far more than the context": ({"max_tokens": 2**62}, "CONTEXT_EXCEEDED", {"limit": BOUNDS["max_context"]}),
    "a stale version": ({"expected_version": 7}, "STALE_VERSION", {"expected": 7, "current": 0}),
    "a stale length": ({"expected_len": 3}, "STALE_LENGTH", {"expected": 3}),
    "no request id": ({"request_id": ""}, "INVALID_ARGUMENT", {"field": "request_id"}),
    "no session id": ({"session_id": ""}, "INVALID_ARGUMENT", {"field": "session_id"}),
    "an unknown session": ({"session_id": "nowhere"}, "SESSION_NOT_FOUND", {"session_id": "nowhere"}),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(scene: Scene, case: str) -> None:
    fields, reason, metadata = CASES[case]
    scene.refused(scene.generate(**fields), reason, **metadata)


def test_what_is_needed_and_what_is_free_is_in_the_error(scene: Scene) -> None:
    opened = scene.state.num_tokens + 1  # the assistant's marker
    free = BOUNDS["max_context"] - opened
    bounds = {"needed": 501, "limit": 500, "free": free}
    scene.refused(scene.generate(max_tokens=free + 1), "CONTEXT_EXCEEDED", **bounds)
    done = scene.side.generate(scene.generate(max_tokens=free, force_token_ids=[scene.side.end]))[-1].done
    assert done.usage.generated == 1


@pytest.fixture
def empty(side: Side) -> Iterator[Scene]:
    scene = Scene(side, [])
    yield scene
    scene.close()


@pytest.mark.parametrize("raw", [False, True])
def test_an_empty_session(empty: Scene, raw: bool) -> None:
    empty.refused(empty.generate(raw=raw), "EMPTY_SESSION")


def test_a_session_emptied_by_the_same_call(scene: Scene) -> None:
    gone = pb.Directive(span=pb.Span(start=0, end=scene.state.num_tokens), allow_sink=True)
    scene.refused(scene.generate(directives=[gone]), "EMPTY_SESSION")
