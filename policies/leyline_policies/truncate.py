"""Clears tool results by age: the paper's ten-line rule."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_policies.facts import ages
from leyline_policies.tool_results import ToolResultPolicy
from leyline_sdk.policy import PolicyContext


@dataclass(frozen=True)
class TruncateOlderThan(ToolResultPolicy):
    """Results that are more than `older_than` turns old give way. Knobs: ToolResultPolicy, Batching."""

    older_than: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("older_than", self.older_than, 0)

    def stale(self, context: PolicyContext) -> set[str]:
        return {message_id for message_id, age in ages(context.transcript).items() if age > self.older_than}
