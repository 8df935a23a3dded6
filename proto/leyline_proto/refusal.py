"""The one exception with which a rule of the contract refuses a request.

Owns the table from reason to gRPC status. The service turns a `Refusal` into a status with
`google.rpc.ErrorInfo`; the SDK's fake raises the same object, so both sides word every error alike.
"""

from __future__ import annotations

from typing import Final

import grpc

from leyline_proto import leyline_pb2 as pb

DOMAIN: Final = "leyline"

_S = grpc.StatusCode
STATUS: Final[dict[str, grpc.StatusCode]] = {
    "INVALID_ARGUMENT": _S.INVALID_ARGUMENT,
    "SPANS_OVERLAP": _S.INVALID_ARGUMENT,
    "SPAN_OUT_OF_RANGE": _S.OUT_OF_RANGE,
    "TOO_LONG": _S.INVALID_ARGUMENT,
    "TOKEN_OUT_OF_RANGE": _S.INVALID_ARGUMENT,
    "ILLEGAL_CUT": _S.FAILED_PRECONDITION,
    "ATTENTION_SINK": _S.FAILED_PRECONDITION,
    "UNPAIRED_TOOL_CALL": _S.FAILED_PRECONDITION,
    "UNANSWERED_TOOL_CALL": _S.FAILED_PRECONDITION,
    "UNKNOWN_TOOL_CALL": _S.INVALID_ARGUMENT,
    "SESSION_NOT_FOUND": _S.NOT_FOUND,
    "SESSION_EXISTS": _S.ALREADY_EXISTS,
    "REQUEST_ID_REUSED": _S.ALREADY_EXISTS,
    "STALE_VERSION": _S.ABORTED,
    "STALE_LENGTH": _S.ABORTED,
    "BUSY": _S.ABORTED,
    "EMPTY_SESSION": _S.FAILED_PRECONDITION,
    "CONTEXT_EXCEEDED": _S.RESOURCE_EXHAUSTED,
    "POOL_EXCEEDED": _S.RESOURCE_EXHAUSTED,
    "QUEUE_FULL": _S.RESOURCE_EXHAUSTED,
    "TOO_MANY_SESSIONS": _S.RESOURCE_EXHAUSTED,
    "NOT_SUPPORTED": _S.FAILED_PRECONDITION,
    "UNKNOWN_EDIT": _S.NOT_FOUND,
    "NOT_UNDOABLE": _S.FAILED_PRECONDITION,
    "UNAUTHENTICATED": _S.UNAUTHENTICATED,
    "UNKNOWN_MESSAGE": _S.NOT_FOUND,
    "SHUTTING_DOWN": _S.UNAVAILABLE,
    "MODEL_FAILED": _S.INTERNAL,
    "MESSAGE_EXISTS": _S.ALREADY_EXISTS,
    "CANCELLED": _S.CANCELLED,
}
_PREFIX: Final = "ERROR_REASON_"
assert {_PREFIX + reason for reason in STATUS} == set(pb.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}


class Refusal(Exception):
    """A request that the contract refuses; whoever raises it has changed nothing.

    Args:
        reason: a name of `ErrorReason` without its prefix, e.g. "STALE_VERSION".
        message: one sentence that names the bound and the value.
        metadata: the bound and the value again, for programs.
    """

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        if reason not in STATUS:
            raise KeyError(reason)
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def status(self) -> grpc.StatusCode:
        return STATUS[self.reason]


def check_length(what: str, value: int, limit: int, unit: str = "tokens") -> None:
    """Raises TOO_LONG when `value` is beyond `limit`."""
    if value > limit:
        raise Refusal(
            "TOO_LONG", f"{what} has {value} {unit}; the limit is {limit}", what=what, value=value, limit=limit
        )


def check_current(expected_version: int | None, version: int, expected_len: int | None, length: int) -> None:
    """Raises STALE_VERSION or STALE_LENGTH, with the current value, when the caller's view is not the current one."""
    if expected_version is not None and expected_version != version:
        raise Refusal(
            "STALE_VERSION",
            f"the call expects version {expected_version}; the session is at version {version}",
            expected=expected_version,
            current=version,
        )
    if expected_len is not None and expected_len != length:
        raise Refusal(
            "STALE_LENGTH",
            f"the call expects {expected_len} tokens; the session has {length}",
            expected=expected_len,
            current=length,
        )
