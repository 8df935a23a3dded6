"""Several policies as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leyline_sdk.edits import Edit
from leyline_sdk.errors import ConfigError
from leyline_sdk.planning import plan
from leyline_sdk.policy import Policy, PolicyContext


class Compose(Policy):
    """Runs them in order; later ones see earlier edits, and what one call can't do separately becomes one edit.

    The same as `policies=[..]` of a session, as a value that can be named and nested. Edits carry the labels of the
    policies that planned them.
    """

    def __init__(self, policies: Sequence[Policy], *, name: str | None = None) -> None:
        for policy in policies:
            if not isinstance(policy, Policy):
                raise ConfigError(f"Compose takes policies, not a {type(policy).__name__}")
        self.policies = tuple(policies)
        self._name = name or "Compose"

    @property
    def name(self) -> str:
        return self._name

    @property
    def edits_protected(self) -> bool:
        """Whether one of them does; each is held to its own bounds when it plans."""
        return any(policy.edits_protected for policy in self.policies)

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return plan(self.policies, context.transcript, context.max_context, context.call).edits
