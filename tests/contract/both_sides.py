"""A state machine's ground floor: two sides, their models, and what has to hold after every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from leyline_proto import leyline_pb2 as pb
from tests.contract.comparing import attempt, shape
from tests.contract.model import Model
from tests.contract.scene import fresh
from tests.contract.sides import Side

Build = Callable[[Side, pb.SessionState], Any]


class BothSides(RuleBasedStateMachine):
    """Sends every request to both sides, and checks that they agree with each other and with the model."""

    def __init__(self, sides: dict[str, Side]) -> None:
        super().__init__()
        self.sides = sides
        self.models: list[Model] = []
        self.states: dict[str, dict[str, pb.SessionState]] = {}  # as they were after the last operation
        self.touched: Model | None = None
        self.last: tuple[dict[str, Any], Any, str] | None = None  # requests, outcome, session
        self.number = 0

    # ------------------------------------------------------------ both sides

    def both(self, model: Model, build: Build, remember: bool = True) -> Any:
        """Sends a request to each side; the common outcome: answers of the real side, or a reason."""
        self.touched = model
        sent: dict[str, Any] = {}
        outcomes: dict[str, Any] = {}
        answers: dict[str, Any] = {}
        for name, side in self.sides.items():
            sent[name] = build(side, self.states[model.id][name])
            answers[name], outcomes[name] = attempt(side, sent[name])
        assert outcomes["fake"] == outcomes["real"], sent["real"]
        if remember:
            self.last = (sent, outcomes["real"], model.id)
        return answers["real"] if answers["real"] is not None else outcomes["real"]

    def model(self, pick: int) -> Model:
        return self.models[pick % len(self.models)]

    def message_id(self, model: Model, pick: int) -> str:
        visible = model.visible
        return visible[pick % len(visible)].id if visible else "nobody"

    def new_message_id(self) -> str:
        self.number += 1
        return f"n{self.number}"

    # ------------------------------------------------------------ always

    @invariant()
    def same_on_both_sides(self) -> None:
        if self.touched in self.models:
            self.check(self.touched)

    def check(self, model: Model) -> None:
        states = {name: side.state(model.id) for name, side in self.sides.items()}
        for state in states.values():
            model.check(state)
        assert shape(states["fake"]) == shape(states["real"])
        self.states[model.id] = states

    def teardown(self) -> None:
        try:
            for model in self.models:
                self.check(model)  # also those that no operation named: forks share nothing that can be seen
        finally:
            for model in self.models:
                for side in self.sides.values():
                    attempt(side, pb.CloseSessionRequest(request_id=fresh(), session_id=model.id))
