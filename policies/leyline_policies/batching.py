"""The knobs that every clearing policy has: when it acts, how much goes at once, what is left alone.

Owns the order of decisions: `every`, `trigger`, the candidates, `clear_at_least`, `clear_at_most`. A subclass says
what could go.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from leyline_policies.facts import exchanges, turns
from leyline_policies.triggers import TriggerLike, check_trigger, fires
from leyline_sdk.edits import Edit
from leyline_sdk.errors import ConfigError
from leyline_sdk.foresee import foresee
from leyline_sdk.mode import EditMode, Mode, check_mode
from leyline_sdk.policy import Policy, PolicyContext


@dataclass(frozen=True)
class Candidate:
    """One thing that could go: its edits are made together or not at all, and free `saves` tokens.

    `blank_call` is a tool call whose arguments go with it.
    """

    edits: tuple[Edit, ...]
    saves: int
    blank_call: str = ""


@dataclass(frozen=True, kw_only=True)
class Batching(Policy):
    """See the module.

    Attributes:
        mode: AMORTIZE keeps the KV of what follows an edit; FORGET computes it again; a `Repair` keeps part of it.
        trigger: act only when this fires; a list: when any does.
        every: act only in every n-th turn, so that edits come in batches.
        clear_at_least: do nothing unless this many tokens would go.
        clear_at_most: oldest first, stop once this many tokens went and the trigger fires no more. Needs a trigger:
            without one the rest would go at the next call.
        keep_first: exchanges at the start that are left alone; system messages and the task always are.
        min_tokens: leave alone what is smaller than this.
    """

    mode: EditMode = Mode.AMORTIZE
    trigger: TriggerLike = None
    every: int = 1
    clear_at_least: int = 0
    clear_at_most: int | None = None
    keep_first: int = 0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        self._check_count("every", self.every, 1)
        self._check_count("clear_at_least", self.clear_at_least, 0)
        self._check_count("keep_first", self.keep_first, 0)
        self._check_count("min_tokens", self.min_tokens, 0)
        check_mode(self.name, self.mode)
        triggers = check_trigger(self.name, self.trigger)
        if self.clear_at_most is not None:
            self._check_count("clear_at_most", self.clear_at_most, max(1, self.clear_at_least))
            if not triggers:
                raise ConfigError(f"{self.name}: clear_at_most needs a trigger, or the rest would go at the next call")

    @abstractmethod
    def candidates(self, context: PolicyContext) -> Iterable[Candidate]:
        """What could go, oldest first, and not what went already."""

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        if turns(context) % self.every or not fires(self.trigger, context):
            return []
        chosen = self._enough(list(self.candidates(context)), context)
        if sum(candidate.saves for candidate in chosen) < max(1, self.clear_at_least):
            return []
        return self.edits_of(chosen, context)

    def edits_of(self, chosen: Sequence[Candidate], context: PolicyContext) -> list[Edit]:
        return [edit for candidate in chosen for edit in candidate.edits]

    def _enough(self, candidates: list[Candidate], context: PolicyContext) -> list[Candidate]:
        """The candidates up to `clear_at_most`."""
        if self.clear_at_most is None:
            return candidates
        gone = 0
        transcript = context.transcript
        for index, candidate in enumerate(candidates):
            gone += candidate.saves
            for edit in candidate.edits:
                transcript = foresee(transcript, edit)
            if gone >= self.clear_at_most and not fires(self.trigger, replace(context, transcript=transcript)):
                return candidates[: index + 1]
        return candidates

    def head(self, context: PolicyContext) -> set[str]:
        """Ids of the messages that `keep_first` protects."""
        return {m.id for exchange in exchanges(context.transcript)[: self.keep_first] for m in exchange}

    def _check_count(self, knob: str, value: object, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.name}: {knob}={value!r} must be a whole number of at least {least}")

    def _check_one_of(self, knob: str, value: object, allowed: Sequence[object]) -> None:
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ConfigError(f"{self.name}: {knob}={value!r} is none of {names}")
