"""The client for asyncio: `AsyncLeyline`, the twin of `client.Leyline`. Each method is documented there."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from leyline_sdk.aio_session import AsyncSession, Opening
from leyline_sdk.calls import Retry
from leyline_sdk.config import Config
from leyline_sdk.core import OnEdit
from leyline_sdk.mode import Repair
from leyline_sdk.policy import Policy
from leyline_sdk.reports import ServerInfo
from leyline_sdk.reuse import Reuse
from leyline_sdk.runner import AsyncRunner
from leyline_sdk.service import Service
from leyline_sdk.transport import AsyncTransport
from leyline_sdk.types import MessageLike, SessionSummary, ToolLike

if TYPE_CHECKING:
    import grpc


class AsyncLeyline:
    """The twin of `Leyline`, for one event loop. `session` and `generate` are awaited or entered with `async with`."""

    def __init__(
        self,
        *,
        target: str | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
        retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        transport: AsyncTransport | None = None,
    ) -> None:
        config = Config.read(target, api_key, timeout_s, retry)
        if transport is None:
            from leyline_sdk.grpc_transport import AsyncGrpcTransport  # slow to import, and a fake needs none

            transport = AsyncGrpcTransport(config.target, credentials)
        self._runner = AsyncRunner(transport, config)
        self._service = Service()

    async def __aenter__(self) -> AsyncLeyline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._runner.transport.close()

    def session(
        self,
        id: str | None = None,
        *,
        tools: Sequence[ToolLike] = (),
        system: str | None = None,
        messages: MessageLike | Sequence[MessageLike] = (),
        policies: Sequence[Policy] = (),
        on_edit: OnEdit | None = None,
        ttl_s: float | None = None,
        create: bool = True,
        reuse: Reuse | None = None,
        reuse_repair: Repair | None = None,
        reuse_least_share: float | None = None,
    ) -> Opening[AsyncSession]:
        async def open() -> AsyncSession:
            core = await self._runner.run(
                self._service.open_session(
                    id,
                    tools=tools,
                    system=system,
                    messages=messages,
                    policies=policies,
                    on_edit=on_edit,
                    ttl_s=ttl_s,
                    create=create,
                    reuse=reuse,
                    reuse_repair=reuse_repair,
                    reuse_least_share=reuse_least_share,
                )
            )
            return AsyncSession(core, self._runner)

        return Opening(open)

    async def sessions(self) -> list[SessionSummary]:
        return await self._runner.run(self._service.sessions())

    async def server_info(self) -> ServerInfo:
        return await self._runner.run(self._service.server_info())

    async def tokenize(self, text: str) -> list[int]:
        return await self._runner.run(self._service.tokenize(text))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._runner.run(self._service.detokenize(token_ids))
