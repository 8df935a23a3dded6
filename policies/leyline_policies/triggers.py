"""When a policy acts. Each knob `trigger` takes one of these or a list of them: any fires; `AllOf`: all must.

Owns no state: a trigger is a question about the context as it stands. The counts must be exceeded, not reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from leyline_policies.facts import turns
from leyline_sdk.errors import ConfigError
from leyline_sdk.policy import PolicyContext


class Trigger(ABC):
    """A condition. Must be pure."""

    @abstractmethod
    def fires(self, context: PolicyContext) -> bool: ...


TriggerLike = Trigger | Sequence[Trigger] | None


@dataclass(frozen=True)
class Tokens(Trigger):
    """More than `n` tokens in the session."""

    n: int

    def __post_init__(self) -> None:
        _check("Tokens", self.n)

    def fires(self, context: PolicyContext) -> bool:
        return context.num_tokens > self.n


@dataclass(frozen=True)
class ToolUses(Trigger):
    """More than `n` tool results that no edit has touched: it falls silent once they are cleared."""

    n: int

    def __post_init__(self) -> None:
        _check("ToolUses", self.n)

    def fires(self, context: PolicyContext) -> bool:
        return sum(not message.edited for message in context.transcript.of_role("tool")) > self.n


@dataclass(frozen=True)
class Turns(Trigger):
    """More than `n` turns behind us; from then on it always fires. For every k-th turn use the knob `every`."""

    n: int

    def __post_init__(self) -> None:
        _check("Turns", self.n)

    def fires(self, context: PolicyContext) -> bool:
        return turns(context) > self.n


@dataclass(frozen=True)
class Fraction(Trigger):
    """More than this share of the context in use."""

    f: float

    def __post_init__(self) -> None:
        if not 0 <= self.f <= 1:
            raise ConfigError(f"Fraction({self.f!r}): a share lies between 0 and 1")

    def fires(self, context: PolicyContext) -> bool:
        return context.fraction > self.f


@dataclass(frozen=True, init=False)
class AllOf(Trigger):
    """Fires when all of these do."""

    triggers: tuple[Trigger, ...]

    def __init__(self, *triggers: Trigger) -> None:
        if not triggers:
            raise ConfigError("AllOf() needs at least one trigger")
        object.__setattr__(self, "triggers", check_trigger("AllOf", triggers))

    def fires(self, context: PolicyContext) -> bool:
        return all(trigger.fires(context) for trigger in self.triggers)


def check_trigger(owner: str, trigger: TriggerLike) -> tuple[Trigger, ...]:
    """The triggers as a tuple; none: always. Raises ConfigError for what is no trigger."""
    if trigger is None:
        return ()
    given = (trigger,) if isinstance(trigger, Trigger) else trigger
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(t, Trigger) for t in given):
        raise ConfigError(f"{owner}: trigger={trigger!r} is no trigger and no list of triggers, such as Tokens(8000)")
    return tuple(given)


def fires(trigger: TriggerLike, context: PolicyContext) -> bool:
    """Whether any of them fires; without any, always."""
    triggers = check_trigger("trigger", trigger)
    return not triggers or any(one.fires(context) for one in triggers)


def _check(name: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise ConfigError(f"{name}({n!r}): a count is a whole number of at least 0")
