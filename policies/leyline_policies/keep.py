"""Clears tool results by their number."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_policies.tool_results import ToolResultPolicy
from leyline_sdk.policy import PolicyContext


@dataclass(frozen=True)
class KeepLast(ToolResultPolicy):
    """The newest `keep` tool results stay, older ones give way. Knobs: ToolResultPolicy, Batching.

    All results count, also those of tools that are left alone, and those that were cleared.
    """

    keep: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("keep", self.keep, 0)

    def stale(self, context: PolicyContext) -> set[str]:
        results = context.transcript.of_role("tool")
        return {message.id for message in results[: max(0, len(results) - self.keep)]}
