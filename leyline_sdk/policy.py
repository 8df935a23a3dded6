"""What a policy is: it reads the transcript and says what should give way. Subclass one of two.

Owns the two base classes and the context they are given. When they run, and what they may not do, is `planning`.

    class DropOldLogs(Policy):
        def plan(self, context):
            return [clear(m, "[cleared]") for m in context.editable if m.role == "tool" and m.age > 2]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from leyline_sdk.edits import Edit
from leyline_sdk.errors import ConfigError
from leyline_sdk.message_diff import diff
from leyline_sdk.mode import EditMode, Mode
from leyline_sdk.transcript import Message, Transcript

BYTES_PER_TOKEN = 3.5  # of English text and code, where a session has nothing to measure by


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy sees. Later policies of a chain see the transcript as earlier ones leave it; the token counts of
    what those put in are estimates.

    Attributes:
        transcript: the session, before this call.
        max_context: tokens that a session may hold.
        call: what is about to happen: "append", "generate", "prefill" or "preview".
    """

    transcript: Transcript
    max_context: int
    call: str = "generate"

    @property
    def num_tokens(self) -> int:
        return self.transcript.num_tokens

    @property
    def fraction(self) -> float:
        """Of the context that is in use."""
        return self.num_tokens / self.max_context if self.max_context else 0.0

    @property
    def turn(self) -> int:
        """Generates finished."""
        return self.transcript.turn

    @property
    def editable(self) -> list[Message]:
        """The messages that a policy may edit: not system, not the task, not the last user message, not one whose
        edit was undone by hand."""
        barred = self.transcript.protected().keys() | self.transcript.pinned
        return [message for message in self.transcript if message.id not in barred]

    @property
    def tool_results(self) -> list[Message]:
        """The editable tool messages, oldest first."""
        return [message for message in self.editable if message.role == "tool"]

    def estimate_tokens(self, text: str) -> int:
        """Tokens of a text, by the bytes per token of this session's own messages."""
        return estimate_tokens(text, self.transcript)


def estimate_tokens(text: str, transcript: Transcript) -> int:
    """As PolicyContext.estimate_tokens."""
    if not text:
        return 0
    known = [m for m in transcript if m.text_known and m.content_tokens]
    tokens = sum(m.content_tokens for m in known)
    size = sum(len(m.text.encode(errors="replace")) for m in known)
    ratio = size / tokens if tokens and size else BYTES_PER_TOKEN
    return max(1, round(len(text.encode(errors="replace")) / ratio))


class Policy(ABC):
    """Says what should give way. `plan` is pure and idempotent: what it planned and was done, it plans no more.

    A policy that raises stops the call before anything is sent.
    """

    @property
    def name(self) -> str:
        """The label of its edits."""
        return type(self).__name__

    @property
    def edits_protected(self) -> bool:
        """Whether it may edit the system prompt, the task and the last user message, and what an undo brought back:
        for redaction, where leaving one out would be worse."""
        return False

    @abstractmethod
    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        """The edits to make now. Runs before each append, generate and prefill; calls no server.

        An edit that would change nothing, such as a `clear` of what says that already, is left out. Where the outcome
        depends on what it is made of, go by the content ("is it still long?"), not by `Message.edited`, which is true
        after another policy's edit too.
        """


def check_policies(policies: Iterable[Policy]) -> None:
    """Raises ConfigError for what is no policy."""
    if isinstance(policies, Policy) or not isinstance(policies, Iterable):
        raise ConfigError(f"policies are a list, not a {type(policies).__name__}")
    for policy in policies:
        if isinstance(policy, type):
            raise ConfigError(
                f"policies holds the class {policy.__name__}, not an instance: write {policy.__name__}(..)"
            )
        if not isinstance(policy, Policy):
            raise ConfigError(f"policies holds a {type(policy).__name__}, which is no Policy")


class MessagePolicy(Policy):
    """A function from messages to messages, OpenAI-style dicts, which Leyline turns into edits by message id.

    It may change contents, reasoning and call arguments, and leave messages out. What an edit can't say (reordered,
    inserted or re-roled messages, other calls) raises InexpressibleChange.
    """

    mode: EditMode = Mode.AMORTIZE

    @abstractmethod
    def transform(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages as they should be. Gets its own copy, each dict with an `id`."""

    def plan(self, context: PolicyContext) -> Iterable[Edit]:
        return diff(context.transcript, self.transform(context.transcript.to_messages()), self.mode, self.name)

    @staticmethod
    def of(
        function: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
        *,
        name: str | None = None,
        mode: EditMode = Mode.AMORTIZE,
    ) -> MessagePolicy:
        """A policy from an existing context-editing function."""
        return _FunctionPolicy(function, name or str(getattr(function, "__name__", "function")), mode)


class _FunctionPolicy(MessagePolicy):
    def __init__(
        self, function: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], name: str, mode: EditMode
    ) -> None:
        self._function = function
        self._name = name
        self.mode = mode

    @property
    def name(self) -> str:
        return self._name

    def transform(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._function(messages)
