"""The one error tree; `error_table` maps refusals to it. `grpc.RpcError` never leaks: it is the `__cause__`.

    LeylineError
    ├── ConfigError                  a bad argument or environment variable; nothing was sent
    ├── PolicyError                  a policy raised or planned what it must not; nothing was sent
    │   └── InexpressibleChange      a MessagePolicy changed messages in a way that no edit can say
    └── APIError                     the server refused, or could not be reached
        ├── InvalidArgument          TooLong, TokenOutOfRange
        ├── InvalidDirective         SpansOverlap, SpanOutOfRange, IllegalCut, AttentionSink, UnpairedToolCall
        ├── NotFound                 SessionNotFound, UnknownMessage, UnknownEdit
        ├── AlreadyExists            SessionExists, MessageExists, RequestIdReused
        ├── Aborted                  StaleVersion, StaleLength, SessionBusy
        ├── ResourceExhausted        ContextExceeded, PoolExceeded, QueueFull, TooManySessions
        ├── FailedPrecondition       EmptySession, UnansweredToolCall, NotUndoable, NotSupported
        ├── UnknownToolCall, Unauthenticated, DeadlineExceeded, Cancelled
        ├── Unavailable              ShuttingDown
        └── Internal                 ModelFailed

A refused call has changed nothing. After Unavailable, DeadlineExceeded and Cancelled nobody knows: the session looks.
"""

from __future__ import annotations

from collections.abc import Mapping


class LeylineError(Exception):
    """Everything that this package raises on purpose."""


class ConfigError(LeylineError, ValueError):
    """A bad argument or environment variable; nothing was sent."""


class PolicyError(LeylineError):
    """A policy raised (`__cause__`) or planned what it must not; the call was stopped before anything was sent."""

    def __init__(self, message: str, *, policy: str, message_id: str | None = None) -> None:
        super().__init__(message)
        self.policy, self.message_id = policy, message_id


class InexpressibleChange(PolicyError):
    """A MessagePolicy reordered, inserted or re-roled messages, or changed which tools were called."""


class APIError(LeylineError):
    """The server refused the call, or could not be reached.

    Attributes:
        status: name of the gRPC status code, e.g. "ABORTED".
        reason: name of the contract's ErrorReason, e.g. "STALE_VERSION"; empty when the status is all there is.
        request_id: of the call; None for reads.
        metadata: bounds and values, as strings.
        retryable: the same call may succeed later. Safe with the same request_id. `Retry` says which are tried
            again without asking you.
    """

    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        status: str = "UNKNOWN",
        reason: str = "",
        request_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status, self.reason = status, reason
        self.request_id = request_id
        self.metadata: dict[str, str] = dict(metadata or {})

    def _int(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return int(value) if value is not None and value.lstrip("-").isdigit() else None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which the server suggests to try again."""
        return float(self.metadata["retry_after_s"]) if "retry_after_s" in self.metadata else None


class InvalidArgument(APIError):
    """A field is malformed or missing."""

    @property
    def field(self) -> str | None:
        return self.metadata.get("field")

    @property
    def limit(self) -> int | None:
        """The bound that was broken, where it is a number."""
        return self._int("limit")


class TooLong(InvalidArgument):
    """An id, an R or a list beyond its bound."""


class TokenOutOfRange(InvalidArgument):
    """A token id outside the vocabulary."""


class InvalidDirective(APIError):
    """An edit that the contract doesn't allow."""

    @property
    def message_id(self) -> str | None:
        return self.metadata.get("message_id")


class SpansOverlap(InvalidDirective):
    """Two edits of one call share tokens."""


class SpanOutOfRange(InvalidDirective):
    """A span beyond the session, or a content range beyond its message."""

    @property
    def length(self) -> int | None:
        """Tokens that there are."""
        return self._int("length")


class IllegalCut(InvalidDirective):
    """A cut through a role marker, a tool call or a UTF-8 character."""


class AttentionSink(InvalidDirective):
    """AMORTIZE in the first tokens of a session, without allow_sink."""


class UnpairedToolCall(InvalidDirective):
    """The edit would part a tool call and its result."""

    @property
    def call_id(self) -> str | None:
        return self.metadata.get("call_id")


class NotFound(APIError):
    """What the call names does not exist."""


class SessionNotFound(NotFound):
    """No such session: it never was, was closed, or expired."""


class UnknownMessage(NotFound):
    """No such message in the session."""


class UnknownEdit(NotFound):
    """No such edit in the session."""


class AlreadyExists(APIError):
    """An id is taken."""


class SessionExists(AlreadyExists):
    """The session id is taken."""


class MessageExists(AlreadyExists):
    """The message or tool-call id is taken."""


class RequestIdReused(AlreadyExists):
    """The request_id came before with another body."""


class Aborted(APIError):
    """The session is not as the caller thinks."""

    @property
    def current(self) -> int | None:
        """The server's value: the version for StaleVersion, tokens for StaleLength."""
        return self._int("current")

    @property
    def expected(self) -> int | None:
        return self._int("expected")


class StaleVersion(Aborted):
    """Somebody else edited the session. `Session.refresh()` fetches it anew."""


class StaleLength(Aborted):
    """Somebody else appended to the session. `Session.refresh()` fetches it anew."""


class SessionBusy(Aborted):
    """A Generate is running in the session."""

    retryable = True


class ResourceExhausted(APIError):
    """More than there is. `needed` and `limit` count tokens."""

    @property
    def needed(self) -> int | None:
        return self._int("needed")

    @property
    def limit(self) -> int | None:
        return self._int("limit")


class ContextExceeded(ResourceExhausted):
    """More tokens than a session may hold."""


class PoolExceeded(ResourceExhausted):
    """More tokens than the server's pool has slots."""


class QueueFull(ResourceExhausted):
    """Too many requests wait to run, or too many calls for one session; see `retry_after_s`."""

    retryable = True


class TooManySessions(ResourceExhausted):
    """The server holds all the sessions that it may, until one is closed or expires; see `retry_after_s`."""

    retryable = True


class FailedPrecondition(APIError):
    """The session is not in a state for this."""


class EmptySession(FailedPrecondition):
    """There is nothing to generate from."""


class UnansweredToolCall(FailedPrecondition):
    """Tool calls wait for their results."""

    @property
    def call_ids(self) -> list[str]:
        return [call_id for call_id in self.metadata.get("call_ids", "").split(",") if call_id]


class NotUndoable(FailedPrecondition):
    """FORGET is final, and a later edit may cover an earlier one."""


class NotSupported(FailedPrecondition):
    """The model or the server can't do this."""

    @property
    def feature(self) -> str | None:
        return self.metadata.get("feature")


class UnknownToolCall(APIError):
    """No such tool call waits for a result."""

    @property
    def call_id(self) -> str | None:
        return self.metadata.get("call_id")


class Unauthenticated(APIError):
    """The api key is missing or unknown."""


class Unavailable(APIError):
    """The server can't be reached. The outcome is unknown; a retry with the same request_id acts once."""

    retryable = True


class ShuttingDown(Unavailable):
    """The server drains and takes no new calls."""


class DeadlineExceeded(APIError):
    """The call took longer than its timeout. The outcome is unknown."""

    retryable = True


class Cancelled(APIError):
    """The call was cancelled, by this side or the server."""


class Internal(APIError):
    """The server failed."""


class ModelFailed(Internal):
    """The model's forward pass raised; the session is as it was."""
