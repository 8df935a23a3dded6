"""Takes secrets out of the history and out of the cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from leyline_policies.facts import count_parts
from leyline_sdk.edits import Edit, cut_text, rerender
from leyline_sdk.errors import ConfigError, PolicyError
from leyline_sdk.mode import EditMode, Mode, check_mode
from leyline_sdk.policy import Policy, PolicyContext
from leyline_sdk.text_cuts import TextCut, cut, then
from leyline_sdk.transcript import Message

Pattern = str | re.Pattern[str]


@dataclass(frozen=True)
class Redact(Policy):
    """Every match of a pattern gives way, in texts, reasoning and the arguments of tool calls.

    Only the tokens that hold a match go, however long the message is; a message whose tool calls have a match in
    their arguments is rendered anew.

    A redaction is a wish of the user's, so it goes further than other policies: it reaches the system prompt, the
    task and the last user message too, in which only the matches change. It runs before each Generate, so that a
    secret that has just been appended is cut before anything is computed from it, unless it was prefilled.

    It does not see: what an edit removed before this policy was there (use `forget(edit_id)`), tool schemas, and a
    message that a cut-short Generate left open, until the next append closes it.

    Attributes:
        pattern: a regular expression or several.
        replacement: as in `re.sub`, \\1 included. A redacted text must have no match that would change it again.
        protected: "redact" the system prompt, the task and the last user message as all others; "leave" them; or
            "raise" PolicyError, before anything is sent, when one has a match.
        roles: only messages of these roles; None: all.
        mode: FORGET computes what follows again: nothing in the cache comes from the secret any more. AMORTIZE
            takes it out of the text alone.
    """

    pattern: Pattern | Sequence[Pattern]
    replacement: str = "[redacted]"
    protected: Literal["redact", "leave", "raise"] = "redact"
    roles: Collection[str] | None = None
    mode: EditMode = Mode.FORGET
    _patterns: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = (self.pattern,) if isinstance(self.pattern, str | re.Pattern) else tuple(self.pattern)
        try:
            object.__setattr__(self, "_patterns", tuple(re.compile(pattern) for pattern in given))
        except (re.error, TypeError) as error:
            raise ConfigError(f"Redact: pattern={given!r} is no regular expression: {error}") from error
        if not given:
            raise ConfigError("Redact needs a pattern")
        if self.protected not in ("redact", "leave", "raise"):
            raise ConfigError(f"Redact: protected={self.protected!r} is none of redact, leave, raise")
        if isinstance(self.roles, str):
            object.__setattr__(self, "roles", (self.roles,))
        check_mode("Redact", self.mode)

    @property
    def edits_protected(self) -> bool:
        return self.protected == "redact"

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        editable = {message.id for message in context.editable}
        edits: list[Edit] = []
        for message in context.transcript:
            if message.open or (self.roles is not None and message.role not in self.roles):
                continue
            found = self._edits(message)
            if found and message.id not in editable and self.protected == "raise":
                why = context.transcript.protected().get(message.id, "pinned by an undo")
                raise PolicyError(
                    f"Redact found a match in message {message.id!r}, which it may not edit: it is {why}; say "
                    "protected='redact' or 'leave'",
                    policy=self.name,
                    message_id=message.id,
                )
            if message.id in editable or self.protected == "redact":
                edits.extend(found)
        return edits

    def _edits(self, message: Message) -> list[Edit]:
        if not message.text_known:
            return []
        text, reasoning = self._cuts(message.text), self._cuts(message.reasoning)
        new = self._dict(message)
        calls = new.get("tool_calls") != message.to_dict().get("tool_calls")
        odd = (text and count_parts(message, "text") != 1) or (reasoning and count_parts(message, "reasoning") != 1)
        if calls or odd:
            return [rerender(message, new, mode=self.mode)]
        parts: tuple[tuple[Literal["content", "reasoning"], list[TextCut]], ...]
        parts = (("reasoning", reasoning), ("content", text))
        return [
            cut_text(message, one.start, one.end, one.text, part=part, mode=self.mode)
            for part, cuts in parts
            for one in cuts
        ]

    def _cuts(self, text: str) -> list[TextCut]:
        """The matches that change something, told of this text; a later pattern sees what an earlier one left."""
        self._clean(text)
        cuts: list[TextCut] = []
        now = text
        for pattern in self._patterns:
            matches = pattern.finditer(now)
            found = [TextCut(match.start(), match.end(), match.expand(self.replacement)) for match in matches]
            found = [one for one in found if one.text != now[one.start : one.end]]
            cuts, now = then(cuts, found), cut(now, found)
        return sorted(cuts, key=lambda one: (one.start, one.end))

    def _dict(self, message: Message) -> dict[str, Any]:
        """The message without its secrets."""
        new = message.to_dict()
        new["content"] = self._clean(message.text)
        if message.reasoning:
            new["reasoning"] = self._clean(message.reasoning)
        if message.tool_calls:
            clean = [{**call, "function": dict(call["function"])} for call in new["tool_calls"]]
            for call, old in zip(clean, message.tool_calls, strict=True):
                arguments = self._clean_value(dict(old.arguments))
                if arguments != old.arguments:
                    call["function"]["arguments"] = arguments
            new["tool_calls"] = clean
        return new

    def _clean_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._clean(value)
        if isinstance(value, dict):
            return {self._clean(key): self._clean_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._clean_value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = self._clean(str(value))
            return value if text == str(value) else text
        return value

    def _clean(self, text: str) -> str:
        once = self._substituted(text)
        if self._substituted(once) != once:
            raise PolicyError(
                f"Redact: {self.replacement!r} has matches of the pattern itself, so it would never come to rest",
                policy=self.name,
            )
        return once

    def _substituted(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(self.replacement, text)
        return text
