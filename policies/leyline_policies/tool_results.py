"""The knobs that policies over tool results have: which tools, what comes in the place of a result, what is done.

Owns the placeholder, the preview and the blanking of arguments. A subclass says which results are stale. A result
that the model has not read yet is never cleared, nor one that has been cleared already, nor where nothing is saved.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from leyline_policies.batching import Batching, Candidate
from leyline_policies.facts import count_parts, unread
from leyline_sdk.edits import Edit, clear, rerender
from leyline_sdk.errors import ConfigError, PolicyError
from leyline_sdk.policy import PolicyContext
from leyline_sdk.transcript import Message, call_dict
from leyline_sdk.types import ToolCall

Tag = Literal["keep", "remove"]
Tags = Mapping[str, Tag] | Callable[[Message], Tag | None]


@dataclass(frozen=True, kw_only=True)
class ToolResultPolicy(Batching):
    """See the module; attributes as in Batching, and:

    Attributes:
        placeholder: what stands where the result stood: text, a function of the message, or None: nothing.
        preview_tokens: about this many tokens of the result stay, from its `preview`: "head", "tail" or "both".
        only_tools: names; results of other tools are left alone. exclude_tools: results of these are.
        tags: "keep" or "remove" by message id, tool-call id or tool name, or a function of the message; "remove"
            clears as soon as the model has read it.
        clear_tool_inputs: blank the call's arguments too, also where the result is too short to be worth it: True, or
            the names of the tools whose.
    """

    placeholder: str | Callable[[Message], str] | None = "[cleared]"
    preview_tokens: int = 0
    preview: Literal["head", "tail", "both"] = "head"
    only_tools: Collection[str] | None = None
    exclude_tools: Collection[str] = ()
    tags: Tags | None = None
    clear_tool_inputs: bool | Collection[str] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("preview_tokens", self.preview_tokens, 0)
        self._check_one_of("preview", self.preview, ("head", "tail", "both"))
        for knob in ("only_tools", "exclude_tools", "clear_tool_inputs"):
            value = getattr(self, knob)
            if isinstance(value, str):
                object.__setattr__(self, knob, (value,))
            elif value is not None and not isinstance(value, bool) and not isinstance(value, Collection):
                raise ConfigError(f"{self.name}: {knob}={value!r} is no list of tool names")
        both = sorted(set(self.only_tools or ()) & set(self.exclude_tools))
        if both:
            raise ConfigError(f"{self.name}: only_tools and exclude_tools both name {both}")
        if isinstance(self.tags, Mapping):
            for tag in self.tags.values():
                self._check_one_of("tags", tag, ("keep", "remove"))

    @abstractmethod
    def stale(self, context: PolicyContext) -> AbstractSet[str]:
        """Ids of the messages whose time has come, by this policy's rule alone."""

    def candidates(self, context: PolicyContext) -> Iterable[Candidate]:
        stale = self.stale(context)
        untouchable = unread(context.transcript) | self.head(context)
        calls = self._blankable(context)
        for message in context.tool_results:
            tag = self._tag(message)
            if message.id in untouchable or tag == "keep" or not self._is_for(message):
                continue
            if tag == "remove" or message.id in stale:
                candidate = self._candidate(message, calls.get(message.tool_call_id), context)
                if candidate is not None:
                    yield candidate

    def edits_of(self, chosen: Sequence[Candidate], context: PolicyContext) -> list[Edit]:
        calls = {candidate.blank_call for candidate in chosen} - {""}
        return [*super().edits_of(chosen, context), *self._blanked(calls, context)]

    def _candidate(self, message: Message, call: ToolCall | None, context: PolicyContext) -> Candidate | None:
        """The result, its call's arguments, or both: whatever saves tokens. None when neither does."""
        replacement = "" if self._is_done(message) else self._replacement(message)
        of_result = message.content_tokens - context.estimate_tokens(replacement)
        if self._is_done(message) or count_parts(message, "text") != 1:
            of_result = 0
        of_call = 0
        if call is not None:
            of_call = context.estimate_tokens(call_dict(call)["function"]["arguments"]) - context.estimate_tokens("{}")
        if message.content_tokens + max(0, of_call) < self.min_tokens or max(of_result, of_call) <= 0:
            return None
        edits = (clear(message, replacement or None, mode=self.mode),) if of_result > 0 else ()
        blank_call = message.tool_call_id if of_call > 0 else ""
        return Candidate(edits, max(0, of_result) + max(0, of_call), blank_call)

    def _is_for(self, message: Message) -> bool:
        if message.tool_name in self.exclude_tools:
            return False
        return self.only_tools is None or message.tool_name in self.only_tools

    def _tag(self, message: Message) -> Tag | None:
        if self.tags is None:
            return None
        if not isinstance(self.tags, Mapping):
            return self.tags(message)
        keys = (message.id, message.tool_call_id, message.tool_name)
        return next((self.tags[key] for key in keys if key in self.tags), None)

    def _is_done(self, message: Message) -> bool:
        """Whether it is what clearing leaves. A result that was only redacted, or cut by a gentler policy, is not."""
        if not message.edited:
            return False
        if not message.text_known or callable(self.placeholder) or (self.preview_tokens and not self.placeholder):
            return True  # there is no telling: better not twice
        return self.placeholder in message.text if self.placeholder else not message.content_tokens

    def _replacement(self, message: Message) -> str:
        placeholder = self.placeholder(message) if callable(self.placeholder) else self.placeholder or ""
        if not isinstance(placeholder, str):
            raise PolicyError(f"policy {self.name}: placeholder gave {placeholder!r}, not a str", policy=self.name)
        if not self.preview_tokens or not message.text_known or not message.content_tokens:
            return placeholder
        size = self.preview_tokens * len(message.text) // message.content_tokens  # characters
        if size >= len(message.text):
            return message.text
        head, tail = {"head": (size, 0), "tail": (0, size), "both": (size - size // 2, size // 2)}[self.preview]
        pieces = (message.text[:head], placeholder, message.text[len(message.text) - tail :])
        return "\n".join(piece for piece in pieces if piece)

    # ------------------------------------------------------------ arguments

    def _blankable(self, context: PolicyContext) -> dict[str, ToolCall]:
        """The calls, by id, whose arguments may be blanked and are not."""
        if not self.clear_tool_inputs:
            return {}
        out: dict[str, ToolCall] = {}
        for message in context.editable:
            # A malformed call has no arguments to render anew.
            if message.text_known and count_parts(message, "call") == len(message.tool_calls):
                out.update({call.id: call for call in message.tool_calls if call.arguments and self._blanks(call)})
        return out

    def _blanks(self, call: ToolCall) -> bool:
        if isinstance(self.clear_tool_inputs, bool):
            return self.clear_tool_inputs
        return call.name in self.clear_tool_inputs

    def _blanked(self, calls: set[str], context: PolicyContext) -> list[Edit]:
        """The messages of these calls, rendered anew with empty arguments."""
        edits: list[Edit] = []
        for message in context.editable if calls else ():
            if any(call.id in calls for call in message.tool_calls):
                new = message.to_dict()
                for call in new["tool_calls"]:
                    if call["id"] in calls:
                        call["function"]["arguments"] = "{}"
                edits.append(rerender(message, new, mode=self.mode))
        return edits
