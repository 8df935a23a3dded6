"""The client for threads: `Leyline`. `aio.AsyncLeyline` is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from leyline_sdk.calls import Retry
from leyline_sdk.config import Config
from leyline_sdk.core import OnEdit
from leyline_sdk.mode import Repair
from leyline_sdk.policy import Policy
from leyline_sdk.reports import ServerInfo
from leyline_sdk.reuse import Reuse
from leyline_sdk.runner import Runner
from leyline_sdk.service import Service
from leyline_sdk.session import Session
from leyline_sdk.transport import Transport
from leyline_sdk.types import MessageLike, SessionSummary, ToolLike

if TYPE_CHECKING:
    import grpc


class Leyline:
    """A client of one server. A context manager: leaving it closes the connection, and no session.

    Threads may share it; each session is for one thread at a time.

    Args:
        target: "host:port"; else LEYLINE_TARGET, else 127.0.0.1:50051.
        api_key: bearer token; else LEYLINE_API_KEY, else none.
        timeout_s: seconds that one call may take, its retries included; else LEYLINE_TIMEOUT, else 300.
        retry: which failures are tried again, and how often.
        credentials: for TLS.
        transport: in place of gRPC, for tests.

    Raises:
        ConfigError: a bad argument or environment variable.
    """

    def __init__(
        self,
        *,
        target: str | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
        retry: Retry | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        transport: Transport | None = None,
    ) -> None:
        config = Config.read(target, api_key, timeout_s, retry)
        if transport is None:
            from leyline_sdk.grpc_transport import GrpcTransport  # slow to import, and a fake needs none

            transport = GrpcTransport(config.target, credentials)
        self._runner = Runner(transport, config)
        self._service = Service()

    def __enter__(self) -> Leyline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Sessions live on."""
        self._runner.transport.close()

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
    ) -> Session:
        """Resumes the session with this id if there is one, or creates it: `session.created` says which.

        Args:
            tools: OpenAI-style. A resumed session has its own: others raise ConfigError, none are no objection.
            system, messages: begin a new session; a resumed one has its own.
            policies: run in this order before each append, generate and prefill.
            on_edit: called after each edit that was made, a policy's or by hand.
            ttl_s: seconds without a call after which the server may close a new session.
            create: False only resumes, so that a session that the server has lost or closed does not begin anew
                unnoticed.
            reuse: what it takes from the caches of this api key's tenant, and leaves there; a fork has its session's.
                None is PREFIX for a new session; a resumed one has its own: another raises ConfigError.
                PREFIX: the KV of the same text from its beginning on. Exact.
                REGISTER: as PREFIX; its exact KV can also be found by its content, at any position. While it is
                    open this is a pin: the room of idle sessions is taken last, after that of all caches.
                CONTENT: as REGISTER; it takes the KV of 32 or more equal tokens that stood elsewhere. Saves their
                    prefill, and is approximate: that KV knows the text that stood in front of it there, not here, so
                    that answers may differ. Nothing from the first such token on is exact (`SessionInfo.exact_upto`),
                    and nobody gets it as a prefix or by its content. What a FORGET leaves to compute is computed.
            reuse_repair: CONTENT: what of each stretch of a content hit is computed all the same. Costs as much; all of
                it is a fresh prefill. A resumed session has its own.
            reuse_least_share: CONTENT, 0 to 1: as long as all its KV is exact, hits that save less than this share of
                what a request would compute, what a repair computes of them left out, are left; it is then computed
                whole, exact, and found by others. 0, as unset, takes every hit: the soonest first token as the caches
                stand; 1 none. 0.75 reused more in all where each prompt is a session of its own. A resumed session has
                its own: another raises ConfigError.

        Raises:
            ConfigError: a resumed session has other tools or another reuse; `reuse` or `reuse_repair` is not one, or
                there is a repair or a least share without CONTENT, or a share beyond [0, 1]. Nothing was made.
            SessionNotFound: there is no session of this id, and `create` is False.
            InvalidArgument: the id, a message or a tool is malformed.
            NotSupported: CONTENT, or a share to repair, with a model that can't: `server_info().features` says why.
        """
        core = self._runner.run(
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
        return Session(core, self._runner)

    def sessions(self) -> list[SessionSummary]:
        """All sessions of this api key's tenant."""
        return self._runner.run(self._service.sessions())

    def server_info(self) -> ServerInfo:
        """Model, limits, what is supported and why not."""
        return self._runner.run(self._service.server_info())

    def tokenize(self, text: str) -> list[int]:
        """Ids of plain text, in which nothing is special."""
        return self._runner.run(self._service.tokenize(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids; bytes that form no character become U+FFFD."""
        return self._runner.run(self._service.detokenize(token_ids))
