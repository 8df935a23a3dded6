"""Context-editing settings of other systems as policies. What can't be said raises ConfigError, naming the field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from leyline_policies.compose import Compose
from leyline_policies.keep import KeepLast
from leyline_policies.thinking import ClearThinking
from leyline_policies.triggers import Tokens, ToolUses, Trigger
from leyline_sdk.errors import ConfigError
from leyline_sdk.policy import Policy

TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"


def from_anthropic(context_management: Mapping[str, Any]) -> Policy:
    """A policy from Anthropic's `context_management`: {"edits": [..]}, or one of its edits.

    Knows clear_tool_uses_20250919 and clear_thinking_20251015, with Anthropic's defaults.
    """
    if not isinstance(context_management, Mapping):
        raise ConfigError(f"context_management is a dict, not a {type(context_management).__name__}")
    if "type" in context_management:
        return _anthropic_edit(context_management)
    _only(context_management, {"edits"}, "context_management")
    edits = context_management.get("edits") or []
    if not isinstance(edits, list | tuple):
        raise ConfigError("context_management: edits is a list")
    return Compose([_anthropic_edit(edit) for edit in edits], name="context_management")


def _anthropic_edit(edit: Mapping[str, Any]) -> Policy:
    if not isinstance(edit, Mapping):
        raise ConfigError(f"context_management: an edit is a dict, not a {type(edit).__name__}")
    kind = edit.get("type")
    if kind == TOOL_USES:
        return _clear_tool_uses(edit)
    if kind == THINKING:
        return _clear_thinking(edit)
    raise ConfigError(f"context_management: type {kind!r} is none of {TOOL_USES}, {THINKING}")


def _clear_tool_uses(edit: Mapping[str, Any]) -> Policy:
    _only(edit, {"type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"}, TOOL_USES)
    triggers: dict[str, Callable[[int], Trigger]] = {"input_tokens": Tokens, "tool_uses": ToolUses}
    kind, value = _amount(edit, "trigger", tuple(triggers), ("input_tokens", 100_000), TOOL_USES)
    inputs = edit.get("clear_tool_inputs") or False
    return KeepLast(
        _amount(edit, "keep", ("tool_uses",), ("tool_uses", 3), TOOL_USES)[1],
        trigger=triggers[kind](value),
        clear_at_least=_amount(edit, "clear_at_least", ("input_tokens",), ("input_tokens", 0), TOOL_USES)[1],
        exclude_tools=_names(edit.get("exclude_tools") or (), f"{TOOL_USES}: exclude_tools"),
        clear_tool_inputs=inputs
        if isinstance(inputs, bool)
        else _names(inputs or (), f"{TOOL_USES}: clear_tool_inputs"),
    )


def _clear_thinking(edit: Mapping[str, Any]) -> Policy:
    _only(edit, {"type", "keep"}, THINKING)
    if edit.get("keep") in ("all", {"type": "all"}):
        return Compose([], name="keep all thinking")
    return ClearThinking(_amount(edit, "keep", ("thinking_turns",), ("thinking_turns", 1), THINKING)[1])


def _amount(
    edit: Mapping[str, Any], field: str, kinds: tuple[str, ...], default: tuple[str, int], where: str
) -> tuple[str, int]:
    """{"type": kind, "value": n}; absent or null: the default."""
    given = edit.get(field)
    if given is None:
        return default
    if not isinstance(given, Mapping):
        raise ConfigError(f'{where}: {field} is {{"type": .., "value": ..}}, not {given!r}')
    _only(given, {"type", "value"}, f"{where}: {field}")
    kind, value = given.get("type"), given.get("value")
    if kind not in kinds:
        raise ConfigError(f"{where}: {field} has type {kind!r}, none of {', '.join(kinds)}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where}: {field} has value {value!r}, not a whole number of at least 0")
    return kind, value


def from_langchain(edit: object) -> Policy:
    """A policy from LangChain's ClearToolUsesEdit, or anything with its attributes.

    LangChain's `clear_at_least` is where it stops clearing: it becomes `clear_at_most`, with one difference: clearing
    goes on until the trigger fires no more.
    """
    known = ("trigger", "clear_at_least", "keep", "clear_tool_inputs", "exclude_tools", "placeholder")
    kind = type(edit).__name__
    if is_dataclass(edit):
        names = [field.name for field in fields(edit)]
    else:
        names = [name for name in getattr(edit, "__dict__", {}) if not name.startswith("_")]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"{kind}: unknown field {', '.join(unknown)}")
    missing = [name for name in known if not hasattr(edit, name)]
    if missing:
        raise ConfigError(f"{kind} is no ClearToolUsesEdit: it has no {', '.join(missing)}")
    trigger, at_least, keep, inputs, exclude, placeholder = (getattr(edit, name) for name in known)
    for name, value in (("trigger", trigger), ("clear_at_least", at_least), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{kind}: {name}={value!r} is not a whole number of at least 0")
    if not isinstance(placeholder, str):
        raise ConfigError(f"{kind}: placeholder={placeholder!r} is not a str")
    if not isinstance(inputs, bool):
        raise ConfigError(f"{kind}: clear_tool_inputs={inputs!r} is not a bool")
    return KeepLast(
        keep,
        trigger=Tokens(trigger),
        clear_at_most=at_least or None,
        clear_tool_inputs=inputs,
        exclude_tools=_names(exclude, f"{kind}: exclude_tools"),
        placeholder=placeholder or None,
    )


def _only(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = sorted(str(key) for key in given if key not in known)
    if unknown:
        raise ConfigError(f"{where}: unknown field {', '.join(unknown)}")


def _names(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}={value!r} is no list of tool names")
    return tuple(value)
