"""The error tree: every reason has a class, and gRPC's own errors become typed ones."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import STATUS
from leyline_sdk import errors
from leyline_sdk.calls import Retry
from leyline_sdk.error_table import BY_REASON, BY_STATUS, api_error
from leyline_sdk.grpc_transport import typed


def test_every_reason_has_a_class_of_its_own() -> None:
    assert BY_REASON.keys() == STATUS.keys()
    shared = {errors.InvalidArgument, errors.Cancelled, errors.Unauthenticated}
    classes = [kind for kind in BY_REASON.values() if kind not in shared]
    assert len(set(classes)) == len(classes)


def test_every_status_has_a_class() -> None:
    assert BY_STATUS.keys() == {code.name for code in grpc.StatusCode} - {"OK", "UNKNOWN"}


@pytest.mark.parametrize("reason", sorted(STATUS))
def test_a_reason_agrees_with_its_status(reason: str) -> None:
    by_status = BY_STATUS[STATUS[reason].name]
    error = api_error(STATUS[reason].name, "why", reason=reason)
    if reason not in {"UNKNOWN_TOOL_CALL", "SPANS_OVERLAP", "SPAN_OUT_OF_RANGE"}:  # directives have one family
        assert isinstance(error, (by_status, errors.InvalidDirective))
    assert error.reason == reason


def test_what_is_unknown_falls_back() -> None:
    assert type(api_error("NOT_FOUND", "x", reason="FROM_THE_FUTURE")) is errors.NotFound
    assert type(api_error("UNKNOWN", "x")) is errors.APIError


def test_metadata_is_typed() -> None:
    stale = api_error("ABORTED", "x", reason="STALE_VERSION", metadata={"expected": "1", "current": "3"})
    assert isinstance(stale, errors.StaleVersion)
    assert (stale.expected, stale.current) == (1, 3)
    waiting = api_error("FAILED_PRECONDITION", "x", reason="UNANSWERED_TOOL_CALL", metadata={"call_ids": "a,b"})
    assert isinstance(waiting, errors.UnansweredToolCall)
    assert waiting.call_ids == ["a", "b"]
    full = api_error("RESOURCE_EXHAUSTED", "x", reason="QUEUE_FULL", metadata={"retry_after_s": "0.5"})
    assert full.retry_after_s == 0.5
    assert full.retryable
    many = api_error("RESOURCE_EXHAUSTED", "x", reason="TOO_MANY_SESSIONS", metadata={"retry_after_s": "5"})
    assert (many.retryable, many.retry_after_s) == (True, 5)
    assert not Retry().again(many)


class _Failed(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # grpc ships no types for its exceptions
    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, bytes], ...]) -> None:
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._trailing

    initial_metadata = is_active = time_remaining = cancel = add_callback = None


def _rich(code: grpc.StatusCode, details: str, info: error_details_pb2.ErrorInfo) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=details, details=[packed])
    return bytes(status.SerializeToString())


def test_a_grpc_error_with_details() -> None:
    info = error_details_pb2.ErrorInfo(reason="STALE_LENGTH", domain="leyline", metadata={"current": "7"})
    code = grpc.StatusCode.ABORTED
    error = typed(
        _Failed(code, "stale", (("grpc-status-details-bin", _rich(code, "stale", info)),)),
        pb.AppendRequest(request_id="r1"),
    )
    assert isinstance(error, errors.StaleLength)
    assert (error.current, error.request_id, error.status) == (7, "r1", "ABORTED")


def test_another_domain_is_not_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="STALE_LENGTH", domain="proxy.example")
    code = grpc.StatusCode.ABORTED
    error = typed(_Failed(code, "x", (("grpc-status-details-bin", _rich(code, "x", info)),)), pb.GetSessionRequest())
    assert type(error) is errors.Aborted
    assert error.request_id is None


def test_a_bare_grpc_error() -> None:
    error = typed(_Failed(grpc.StatusCode.UNAVAILABLE, "no route", ()), pb.GetSessionRequest())
    assert isinstance(error, errors.Unavailable)
    assert error.retryable
