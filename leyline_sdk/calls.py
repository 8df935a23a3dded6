"""Operations without I/O: generators that yield the calls to make and are sent the answers.

Owns what an operation may ask of whoever runs it, and which failures may be tried again. `runner` does the asking,
once for threads and once for asyncio, so that both clients share every other line.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from leyline_sdk import errors

T = TypeVar("T")
Answer = TypeVar("Answer", bound=Proto)


@dataclass(frozen=True, slots=True)
class Call:
    """One rpc, by the request's type. `timeout_s` None: the client's own."""

    request: Proto
    timeout_s: float | None = None

    @property
    def method(self) -> str:
        return type(self.request).__name__.removesuffix("Request")


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before going on."""

    seconds: float


Op = Generator[Call | Pause, Any, T]
"""An operation that ends in a T. A failed call is thrown into it as an APIError."""


def ask(request: Proto, answer: type[Answer], timeout_s: float | None = None) -> Op[Answer]:
    """One call within an operation."""
    got = yield Call(request, timeout_s)
    if not isinstance(got, answer):
        raise TypeError(f"the transport answered {type(got).__name__}, not {answer.__name__}")
    return got


def new_request_id() -> str:
    """Made once for each logical operation, so that every retry of it acts once."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Retry:
    """When a failed call is tried again. All retries of a call share its timeout and its request_id.

    Tried again are Unavailable, ShuttingDown and DeadlineExceeded; SessionBusy and QueueFull if you say so;
    TooManySessions never, for a session may take an hour to expire.

    Attributes:
        attempts: in all; 1 never retries.
        first_wait_s: doubled after each attempt, with jitter, up to `max_wait_s`. A server's retry_after_s wins.
        on_busy: also when another Generate runs in the session.
        on_queue_full: also when the server's queue is full.
    """

    attempts: int = 4
    first_wait_s: float = 0.1
    max_wait_s: float = 2.0
    on_busy: bool = False
    on_queue_full: bool = False

    def again(self, error: BaseException) -> bool:
        """Whether this failure may be tried again."""
        if isinstance(error, errors.SessionBusy):
            return self.on_busy
        if isinstance(error, errors.QueueFull):
            return self.on_queue_full
        return isinstance(error, errors.Unavailable | errors.DeadlineExceeded)


def outcome_unknown(error: errors.APIError) -> bool:
    """Whether the call may have acted although it failed."""
    return isinstance(error, errors.Unavailable | errors.DeadlineExceeded | errors.Cancelled) or error.reason == ""
