"""from_anthropic and from_langchain: the same settings, and a refusal that names what can't be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from leyline_policies import ClearThinking, Compose, KeepLast, Tokens, ToolUses, from_anthropic, from_langchain
from leyline_sdk import errors
from leyline_sdk.session import Session
from leyline_sdk.testing import call

TOOLS, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def test_anthropic_defaults() -> None:
    assert from_anthropic({"type": TOOLS}) == KeepLast(3, trigger=Tokens(100_000))
    assert from_anthropic({"type": THINKING}) == ClearThinking(1)


def test_anthropic_full() -> None:
    policy = from_anthropic(
        {
            "edits": [
                {"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}},
                {
                    "type": TOOLS,
                    "trigger": {"type": "tool_uses", "value": 5},
                    "keep": {"type": "tool_uses", "value": 2},
                    "clear_at_least": {"type": "input_tokens", "value": 50},
                    "exclude_tools": ["web_search"],
                    "clear_tool_inputs": True,
                },
            ]
        }
    )
    assert isinstance(policy, Compose)
    assert policy.policies == (
        ClearThinking(2),
        KeepLast(2, trigger=ToolUses(5), clear_at_least=50, exclude_tools=("web_search",), clear_tool_inputs=True),
    )


def test_anthropic_nulls_names_and_all() -> None:
    nulls = dict.fromkeys(("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"))
    assert from_anthropic({"type": TOOLS, **nulls}) == from_anthropic({"type": TOOLS})
    named = from_anthropic({"type": TOOLS, "clear_tool_inputs": ["write"]})
    assert named == KeepLast(3, trigger=Tokens(100_000), clear_tool_inputs=("write",))
    for keep in ("all", {"type": "all"}):
        policy = from_anthropic({"type": THINKING, "keep": keep})
        assert isinstance(policy, Compose)
        assert not policy.policies


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "is a dict"),
        ({"edit": []}, "unknown field edit"),
        ({"edits": {"a": 1}}, "edits is a list"),
        ({"edits": ["x"]}, "an edit is a dict"),
        ({"type": "compact_20260112"}, "compact_20260112"),
        ({"edits": [{}]}, "type None"),
        ({"type": TOOLS, "keeps": 3}, "unknown field keeps"),
        ({"type": TOOLS, "keep": 3}, "keep is"),
        ({"type": TOOLS, "keep": {"type": "input_tokens", "value": 3}}, "keep has type 'input_tokens'"),
        ({"type": TOOLS, "keep": {"type": "tool_uses", "value": -3}}, "value -3"),
        ({"type": TOOLS, "keep": {"type": "tool_uses", "value": 3, "of": "x"}}, "keep: unknown field of"),
        ({"type": TOOLS, "trigger": {"type": "minutes", "value": 3}}, "trigger has type 'minutes'"),
        ({"type": TOOLS, "exclude_tools": "read"}, "exclude_tools='read'"),
        ({"type": TOOLS, "clear_tool_inputs": 7}, "clear_tool_inputs=7"),
        ({"type": THINKING, "trigger": None}, "unknown field trigger"),
    ],
)
def test_anthropic_refuses_what_it_cannot_say(given: Any, named: str) -> None:
    with pytest.raises(errors.ConfigError, match=named):
        from_anthropic(given)


@dataclass
class ClearToolUsesEdit:
    """LangChain's, by its attributes."""

    trigger: int = 100_000
    clear_at_least: int = 0
    keep: int = 3
    clear_tool_inputs: bool = False
    exclude_tools: Sequence[str] = ()
    placeholder: str = "[cleared]"


def test_langchain() -> None:
    assert from_langchain(ClearToolUsesEdit()) == KeepLast(3, trigger=Tokens(100_000))
    edit = ClearToolUsesEdit(2_000, 500, 1, True, ["search"], "(gone)")
    assert from_langchain(edit) == KeepLast(
        1,
        trigger=Tokens(2_000),
        clear_at_most=500,
        clear_tool_inputs=True,
        exclude_tools=("search",),
        placeholder="(gone)",
    )


def test_langchain_refuses_what_it_cannot_say() -> None:
    @dataclass
    class Newer(ClearToolUsesEdit):
        only_tools: list[str] = field(default_factory=list)

    class Plain:
        def __init__(self) -> None:
            self.trigger = 3

    for edit, named in (
        (Newer(), "unknown field only_tools"),
        (Plain(), "has no clear_at_least, keep"),
        (object(), "is no ClearToolUsesEdit"),
        (ClearToolUsesEdit(trigger=0.5), "trigger=0.5"),  # type: ignore[arg-type]
        (ClearToolUsesEdit(keep=-1), "keep=-1"),
        (ClearToolUsesEdit(placeholder=None), "placeholder=None"),  # type: ignore[arg-type]
        (ClearToolUsesEdit(exclude_tools="a"), "exclude_tools='a'"),
        (ClearToolUsesEdit(clear_tool_inputs=["a"]), "clear_tool_inputs"),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.ConfigError, match=named):
            from_langchain(edit)


def test_an_adapted_policy_runs(history: Callable[..., Session]) -> None:
    rounds: list[Any] = [(call("read", n=n), "x" * 40) for n in range(5)]
    session = history(rounds, policies=[from_langchain(ClearToolUsesEdit(trigger=300, keep=2))])
    assert [m.text for m in session.transcript.of_role("tool")].count("[cleared]") == 3
