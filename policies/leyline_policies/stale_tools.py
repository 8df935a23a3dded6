"""Clears tool results that a later one has made worthless: repeated, superseded, or failed before a retry."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from leyline_policies.tool_results import ToolResultPolicy
from leyline_sdk.errors import ConfigError
from leyline_sdk.policy import PolicyContext
from leyline_sdk.transcript import Message
from leyline_sdk.types import ToolCall

Rule = Literal["repeated", "superseded", "failed_then_succeeded"]
RULES: tuple[Rule, ...] = ("repeated", "superseded", "failed_then_succeeded")
Key = str | Sequence[str] | Callable[[ToolCall], Hashable | None] | None
_ERROR = re.compile(r"\s*(error\b|Traceback \(most recent call last\))", re.IGNORECASE)


def looks_failed(message: Message) -> bool:
    """The result starts with "error" or a traceback, or is a JSON object with a truthy "error"."""
    if _ERROR.match(message.text):
        return True
    if not message.text.lstrip().startswith("{"):
        return False
    try:
        value = json.loads(message.text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))


@dataclass(frozen=True)
class StaleToolDetector(ToolResultPolicy):
    """Of results about the same thing the newest stays. Knobs: ToolResultPolicy, Batching.

    Attributes:
        key: what a call is about: the name of an argument, or several; () for the tool alone; None for the tool and
            all arguments; or a function of the call, where None means: about nothing. Calls of different tools are
            never about the same thing, unless a function says so.
        rule: one or several of
            "repeated": the same tool and arguments gave the same result again;
            "superseded": the same key was asked again later, and did not fail;
            "failed_then_succeeded": it failed, and the same key succeeded later.
        failed: how a failed result is recognised: a function of the message, or a pattern that is searched for in
            its text. By default as `looks_failed` says.
    """

    key: Key = None
    rule: Rule | Sequence[Rule] = RULES
    failed: Callable[[Message], bool] | str | re.Pattern[str] = looks_failed

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._rules:
            raise ConfigError(f"{self.name}: rule names none of {', '.join(RULES)}")
        for rule in self._rules:
            self._check_one_of("rule", rule, RULES)
        if isinstance(self.failed, str):
            try:
                object.__setattr__(self, "failed", re.compile(self.failed))
            except re.error as error:
                raise ConfigError(f"{self.name}: failed={self.failed!r} is no pattern: {error}") from error

    @property
    def _rules(self) -> tuple[Rule, ...]:
        return (self.rule,) if isinstance(self.rule, str) else tuple(self.rule)

    def stale(self, context: PolicyContext) -> set[str]:
        out: set[str] = set()
        answered: set[Hashable] = set()  # keys with a later result that did not fail
        seen: set[Hashable] = set()  # calls with their results
        calls = {call.id: call for message in context.transcript for call in message.tool_calls}
        for message in reversed(context.transcript.of_role("tool")):
            call = calls.get(message.tool_call_id)
            if call is None or not message.text_known or self._is_done(message):
                continue
            key, failed = self._key(call), self._failed(message)
            same = (_identity(call), message.text)
            rules = self._rules
            if (
                ("repeated" in rules and same in seen)
                or ("superseded" in rules and not failed and key in answered)
                or ("failed_then_succeeded" in rules and failed and key in answered)
            ):
                out.add(message.id)
            seen.add(same)
            if key is not None and not failed:
                answered.add(key)
        return out

    def _key(self, call: ToolCall) -> Hashable | None:
        if self.key is None:
            return _identity(call)
        if callable(self.key):
            return self.key(call)
        names = (self.key,) if isinstance(self.key, str) else tuple(self.key)
        if any(name not in call.arguments for name in names):
            return None
        return (call.name, *(_json(call.arguments[name]) for name in names))

    def _failed(self, message: Message) -> bool:
        if isinstance(self.failed, re.Pattern):
            return self.failed.search(message.text) is not None
        assert not isinstance(self.failed, str)  # compiled above
        return bool(self.failed(message))


def _identity(call: ToolCall) -> Hashable:
    return (call.name, _json(dict(call.arguments)))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
