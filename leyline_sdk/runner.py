"""Runs operations over a transport, with tenacity's retries: once for threads, once for asyncio.

Owns deadlines and retries. A Generate is retried only until its first event has arrived.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

import tenacity

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_sdk.calls import Call, Op, Pause
from leyline_sdk.config import Config
from leyline_sdk.transport import AsyncResponseStream, AsyncTransport, ResponseStream, Transport

T = TypeVar("T")


class _Deadline:
    """What is left of a call's time, and when to try again."""

    def __init__(self, config: Config, timeout_s: float | None) -> None:
        self._end = time.monotonic() + (config.timeout_s if timeout_s is None else timeout_s)
        self._retry = config.retry
        first, most = config.retry.first_wait_s, config.retry.max_wait_s
        self._backoff = tenacity.wait_exponential(multiplier=first, max=most) + tenacity.wait_random(0, first)

    @property
    def left_s(self) -> float:
        return max(0.001, self._end - time.monotonic())

    def options(self) -> dict[str, Any]:
        """For `tenacity.Retrying` and its async twin."""
        return {
            "retry": tenacity.retry_if_exception(self._retry.again),
            "stop": self._stop,
            "wait": self._wait,
            "reraise": True,
        }

    def _wait(self, state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, errors.APIError) and error.retry_after_s is not None:
            return error.retry_after_s
        return float(self._backoff(state))

    def _stop(self, state: tenacity.RetryCallState) -> bool:
        return state.attempt_number >= self._retry.attempts or state.upcoming_sleep >= self.left_s


class Runner:
    """Runs operations in the calling thread."""

    def __init__(self, transport: Transport, config: Config) -> None:
        self.transport = transport
        self.config = config

    def run(self, op: Op[T]) -> T:
        """Raises what the operation lets through: LeylineErrors."""
        try:
            step = next(op)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = op.send(None)
                    continue
                try:
                    answer = self._call(step)
                except errors.APIError as error:
                    step = op.throw(error)
                else:
                    step = op.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            op.close()  # interrupted in the middle: the operation's own clean-up runs

    def _call(self, call: Call) -> object:
        deadline = _Deadline(self.config, call.timeout_s)

        def attempt() -> object:
            return self.transport.unary(call.method, call.request, deadline.left_s, self.config.metadata)

        return tenacity.Retrying(**deadline.options())(attempt)

    def open(self, request: pb.GenerateRequest, timeout_s: float | None) -> tuple[ResponseStream, pb.GenerateResponse]:
        """A stream and its first event. What arrives before that may be retried."""
        deadline = _Deadline(self.config, timeout_s)

        def attempt() -> tuple[ResponseStream, pb.GenerateResponse]:
            stream = self.transport.stream("Generate", request, deadline.left_s, self.config.metadata)
            try:
                return stream, next(stream)
            except StopIteration:
                raise _cut_short() from None
            except BaseException:
                stream.cancel()
                raise

        return tenacity.Retrying(**deadline.options())(attempt)


class AsyncRunner:
    """Runs operations on the running event loop."""

    def __init__(self, transport: AsyncTransport, config: Config) -> None:
        self.transport = transport
        self.config = config

    async def run(self, op: Op[T]) -> T:
        """As Runner.run."""
        try:
            step = next(op)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = op.send(None)
                    continue
                try:
                    answer = await self._call(step)
                except errors.APIError as error:
                    step = op.throw(error)
                else:
                    step = op.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            op.close()

    async def _call(self, call: Call) -> object:
        deadline = _Deadline(self.config, call.timeout_s)

        async def attempt() -> object:
            return await self.transport.unary(call.method, call.request, deadline.left_s, self.config.metadata)

        return await tenacity.AsyncRetrying(**deadline.options())(attempt)

    async def open(
        self, request: pb.GenerateRequest, timeout_s: float | None
    ) -> tuple[AsyncResponseStream, pb.GenerateResponse]:
        """As Runner.open."""
        deadline = _Deadline(self.config, timeout_s)

        async def attempt() -> tuple[AsyncResponseStream, pb.GenerateResponse]:
            stream = self.transport.stream("Generate", request, deadline.left_s, self.config.metadata)
            try:
                return stream, await anext(stream)
            except StopAsyncIteration:
                raise _cut_short() from None
            except BaseException:
                stream.cancel()
                raise

        return await tenacity.AsyncRetrying(**deadline.options())(attempt)


def _cut_short() -> errors.APIError:
    return errors.Unavailable("the stream ended without a word", status="UNAVAILABLE")
