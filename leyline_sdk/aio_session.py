"""A session for asyncio: the twin of `session.Session`, word for word.

Owns the awaiting alone. Each method is documented at its twin.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, TypeVar

from leyline_sdk import operations, warming
from leyline_sdk.core import SessionCore
from leyline_sdk.edits import Edit
from leyline_sdk.policy import Policy
from leyline_sdk.reports import Warmed
from leyline_sdk.reuse import Reuse
from leyline_sdk.runner import AsyncRunner
from leyline_sdk.stream import AsyncStream, StreamCore
from leyline_sdk.transcript import Transcript
from leyline_sdk.types import Appended, EditResult, MessageLike, Reply, SessionInfo, ToolCall, UndoResult

Opened = TypeVar("Opened", bound=AbstractAsyncContextManager[Any])


class Opening(Generic[Opened]):
    """What `client.session(..)` and `session.generate(..)` return: await it, or enter it with `async with`."""

    def __init__(self, open: Callable[[], Awaitable[Opened]]) -> None:
        self._open = open
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._open().__await__()

    async def __aenter__(self) -> Opened:
        self._opened = await self._open()
        await self._opened.__aenter__()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, trace)


class AsyncSession:
    """The twin of `Session`. One task at a time."""

    def __init__(self, core: SessionCore, runner: AsyncRunner) -> None:
        self._core = core
        self._runner = runner
        core.timeout_s = runner.config.timeout_s
        self._stream: AsyncStream | None = None

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def created(self) -> bool:
        return self._core.created

    @property
    def transcript(self) -> Transcript:
        return self._core.transcript

    @property
    def unanswered(self) -> list[ToolCall]:
        return self._core.transcript.unanswered()

    @property
    def reuse(self) -> Reuse:
        return self._core.reuse

    @property
    def policies(self) -> list[Policy]:
        return self._core.policies

    async def append(
        self,
        messages: MessageLike | Sequence[MessageLike],
        *,
        prefill: bool = False,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Appended:
        return await self._runner.run(
            operations.append(self._core, messages=messages, prefill=prefill, wait=wait, timeout_s=timeout_s)
        )

    async def append_text(self, text: str, *, prefill: bool = False, wait: bool = False) -> Appended:
        return await self._runner.run(operations.append(self._core, text=text, prefill=prefill, wait=wait))

    async def append_ids(self, token_ids: Sequence[int], *, prefill: bool = False, wait: bool = False) -> Appended:
        return await self._runner.run(operations.append(self._core, token_ids=token_ids, prefill=prefill, wait=wait))

    async def tool_result(self, call: ToolCall | str, content: str, *, prefill: bool = False) -> Appended:
        call_id = call if isinstance(call, str) else call.id
        return await self.append_results({call_id: content}, prefill=prefill)

    async def append_results(
        self, results: Mapping[str, str], *, prefill: bool = False, wait: bool = False
    ) -> Appended:
        return await self._runner.run(operations.append_results(self._core, results, prefill=prefill, wait=wait))

    def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        wait: bool = False,
        raw: bool = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        force_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Opening[AsyncStream]:
        async def open() -> AsyncStream:
            request, todo = await self._runner.run(
                operations.generate(
                    self._core,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    seed=seed,
                    stop=stop,
                    wait=wait,
                    raw=raw,
                    stop_token_ids=stop_token_ids,
                    ignore_eos=ignore_eos,
                    force_token_ids=force_token_ids,
                )
            )
            self._stream = await AsyncStream.open(StreamCore(self._core, request, todo), self._runner, timeout_s)
            return self._stream

        return Opening(open)

    async def complete(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        async with self.generate(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            wait=wait,
            timeout_s=timeout_s,
        ) as stream:
            return await stream.final()

    async def edit(
        self,
        *edits: Edit,
        dry_run: bool = False,
        prefill: bool = False,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> EditResult:
        return await self._runner.run(
            operations.edit(self._core, edits, dry_run=dry_run, prefill=prefill, wait=wait, timeout_s=timeout_s)
        )

    async def undo(self, edit_id: str, *, wait: bool = False) -> UndoResult:
        return await self._runner.run(operations.undo(self._core, edit_id, wait=wait))

    async def preview(self) -> EditResult:
        return await self._runner.run(operations.preview(self._core))

    async def prefill(self, *, wait: bool = False, timeout_s: float | None = None) -> EditResult:
        return await self._runner.run(operations.prefill(self._core, wait=wait, timeout_s=timeout_s))

    async def warm(self, documents: str | Sequence[str], *, timeout_s: float | None = None) -> tuple[Warmed, ...]:
        return await self._runner.run(warming.warm(self._core, documents, timeout_s))

    async def fork(self, session_id: str | None = None) -> AsyncSession:
        return AsyncSession(await self._runner.run(operations.fork(self._core, session_id)), self._runner)

    async def info(self, *, token_ids: bool = False) -> SessionInfo:
        return await self._runner.run(operations.info(self._core, token_ids=token_ids))

    async def refresh(self) -> None:
        await self._runner.run(self._core.refresh())

    async def close(self) -> int:
        if self._stream is not None:
            self._stream.cancel()
        return await self._runner.run(operations.close(self._core))
