"""Ready-made policies: what of an agent's history gives way, and when.

    policies = [Redact(r"sk-\\w+"), TruncateOlderThan(2, min_tokens=50)]
    session = client.session(system="..", tools=tools, policies=policies)

Your own is ten lines. It must be pure. What is done, such as a listing that was cleared, is left out by itself:

    class DropOldListings(Policy):
        def plan(self, context):
            return [
                clear(message, "[listing]")
                for message in context.tool_results
                if message.tool_name == "list_files" and message.age > 1
            ]

Knobs that all clearing policies share stand in `batching`, those of policies over tool results in `tool_results`.
"""

from leyline_policies.adapters import from_anthropic, from_langchain
from leyline_policies.batching import Batching, Candidate
from leyline_policies.compose import Compose
from leyline_policies.keep import KeepLast
from leyline_policies.redact import Redact
from leyline_policies.sliding_window import SlidingWindow
from leyline_policies.stale_tools import StaleToolDetector
from leyline_policies.thinking import ClearThinking
from leyline_policies.tool_results import ToolResultPolicy
from leyline_policies.triggers import AllOf, Fraction, Tokens, ToolUses, Trigger, Turns
from leyline_policies.truncate import TruncateOlderThan

__all__ = [
    "AllOf",
    "Batching",
    "Candidate",
    "ClearThinking",
    "Compose",
    "Fraction",
    "KeepLast",
    "Redact",
    "SlidingWindow",
    "StaleToolDetector",
    "Tokens",
    "ToolResultPolicy",
    "ToolUses",
    "Trigger",
    "TruncateOlderThan",
    "Turns",
    "from_anthropic",
    "from_langchain",
]
