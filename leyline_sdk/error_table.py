"""From a refusal to an error class: one table by reason, one by bare gRPC status, and nothing else decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from leyline_sdk import errors

BY_REASON: Final[dict[str, type[errors.APIError]]] = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "SPANS_OVERLAP": errors.SpansOverlap,
    "SPAN_OUT_OF_RANGE": errors.SpanOutOfRange,
    "TOO_LONG": errors.TooLong,
    "TOKEN_OUT_OF_RANGE": errors.TokenOutOfRange,
    "ILLEGAL_CUT": errors.IllegalCut,
    "ATTENTION_SINK": errors.AttentionSink,
    "UNPAIRED_TOOL_CALL": errors.UnpairedToolCall,
    "UNANSWERED_TOOL_CALL": errors.UnansweredToolCall,
    "UNKNOWN_TOOL_CALL": errors.UnknownToolCall,
    "SESSION_NOT_FOUND": errors.SessionNotFound,
    "SESSION_EXISTS": errors.SessionExists,
    "REQUEST_ID_REUSED": errors.RequestIdReused,
    "STALE_VERSION": errors.StaleVersion,
    "STALE_LENGTH": errors.StaleLength,
    "BUSY": errors.SessionBusy,
    "EMPTY_SESSION": errors.EmptySession,
    "CONTEXT_EXCEEDED": errors.ContextExceeded,
    "POOL_EXCEEDED": errors.PoolExceeded,
    "QUEUE_FULL": errors.QueueFull,
    "TOO_MANY_SESSIONS": errors.TooManySessions,
    "NOT_SUPPORTED": errors.NotSupported,
    "UNKNOWN_EDIT": errors.UnknownEdit,
    "NOT_UNDOABLE": errors.NotUndoable,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "UNKNOWN_MESSAGE": errors.UnknownMessage,
    "SHUTTING_DOWN": errors.ShuttingDown,
    "MODEL_FAILED": errors.ModelFailed,
    "MESSAGE_EXISTS": errors.MessageExists,
    "CANCELLED": errors.Cancelled,
}

# For answers without an ErrorInfo: the transport's own, a proxy's, or another server's.
BY_STATUS: Final[dict[str, type[errors.APIError]]] = {
    "CANCELLED": errors.Cancelled,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "PERMISSION_DENIED": errors.Unauthenticated,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "ABORTED": errors.Aborted,
    "OUT_OF_RANGE": errors.InvalidArgument,
    "UNIMPLEMENTED": errors.NotSupported,
    "INTERNAL": errors.Internal,
    "UNAVAILABLE": errors.Unavailable,
    "DATA_LOSS": errors.Internal,
    "UNAUTHENTICATED": errors.Unauthenticated,
}


def api_error(
    status: str,
    message: str,
    *,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    request_id: str | None = None,
) -> errors.APIError:
    """The typed error of a refusal. An unknown reason falls back to its status, an unknown status to APIError."""
    kind = BY_REASON.get(reason) or BY_STATUS.get(status) or errors.APIError
    return kind(message, status=status, reason=reason, metadata=metadata, request_id=request_id)


def request_id_of(request: object) -> str | None:
    """The request_id that a wire message carries; None for reads."""
    return getattr(request, "request_id", None) or None
