"""Remembers the answers of mutating calls, so that a retry acts once.

Owns (tenant, request_id) -> (digest of the body, answer). Not thread-safe: one owner calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

import xxhash

from leyline_proto.refusal import Refusal, check_length

MAX_ID_BYTES = 128

Answer = TypeVar("Answer")


class _Request(Protocol):
    @property
    def request_id(self) -> str: ...

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...


class Once(Generic[Answer]):
    """The last `capacity` answers; an older request_id acts anew."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[tuple[str, str], tuple[str, Answer]] = OrderedDict()

    def find(self, tenant: str, request: _Request) -> Answer | None:
        """The first answer to this request, if there was one.

        Raises INVALID_ARGUMENT without a request_id, TOO_LONG for a long one, REQUEST_ID_REUSED when the id came
        with another body before.
        """
        check_id("request_id", request.request_id, required=True)
        known = self._answers.get((tenant, request.request_id))
        if known is None:
            return None
        if known[0] != _digest(request):
            raise Refusal(
                "REQUEST_ID_REUSED",
                f"request_id {request.request_id!r} was used with another body",
                request_id=request.request_id,
            )
        self._answers.move_to_end((tenant, request.request_id))
        return known[1]

    def record(self, tenant: str, request: _Request, answer: Answer) -> None:
        self._answers[tenant, request.request_id] = (_digest(request), answer)
        if len(self._answers) > self._capacity:
            self._answers.popitem(last=False)

    def drop(self, tenant: str, request: _Request) -> None:
        """Forgets a call that ended in a refusal: a retry tries again."""
        self._answers.pop((tenant, request.request_id), None)


def _digest(request: _Request) -> str:
    body = request.SerializeToString(deterministic=True)
    return type(request).__name__ + xxhash.xxh3_128_hexdigest(body)


def check_id(field: str, value: str, required: bool = False) -> None:
    """Raises INVALID_ARGUMENT or TOO_LONG unless `value` is printable ASCII of at most MAX_ID_BYTES."""
    if not value:
        if required:
            raise Refusal("INVALID_ARGUMENT", f"{field} is missing", field=field)
        return
    check_length(field, len(value.encode()), MAX_ID_BYTES, "bytes")
    if not value.isascii() or not value.isprintable():
        raise Refusal("INVALID_ARGUMENT", f"{field} {value!r} is not printable ASCII", field=field)
