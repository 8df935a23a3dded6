"""Puts the server together: model, pool, engine, sessions, gRPC; starts it and drains it.

Owns the order of start and stop. Everything it wires is elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from leyline_proto import leyline_pb2 as pb
from leyline_proto import leyline_pb2_grpc
from leyline_proto.once import MAX_ID_BYTES
from leyline_proto.refusal import Refusal
from leyline_server.config import ServerConfig
from leyline_server.engine.local import LocalEngine
from leyline_server.lab import canary
from leyline_server.lab.laboratory import Lab, LabError
from leyline_server.model.chat.plain import PlainStream
from leyline_server.model.chat.select import select_format
from leyline_server.model.chat.template import load_renderer
from leyline_server.model.load import LoadedModel, load
from leyline_server.model.tokenizer import TextTokenizer
from leyline_server.service import LeylineService
from leyline_server.sessions.host import Host
from leyline_server.sessions.session import ServedFormat, Serving
from leyline_server.sessions.store import SessionStore
from leyline_server.sizing import (
    choose_chunks,
    choose_context,
    choose_device,
    choose_dtype,
    choose_replacement,
    choose_slots,
    what_fits,
)
from leyline_server.worker import EngineThread

EMBEDDED = {path.name: path for path in sorted((Path(__file__).parent / "assets").iterdir())}
"""The models in the package, by the name that `--model` gives them."""
TINY = EMBEDDED["tiny"]
SINK_TOKENS = 4
MAX_MESSAGE_BYTES = 64 << 20
_DRAIN_POLL_S = 0.02
_CANCEL_S = 2.0  # for cancelled calls to say so
_SERVICE = pb.DESCRIPTOR.services_by_name["Leyline"].full_name
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """A server that is built and not yet listening."""

    config: ServerConfig
    model: LoadedModel
    engine: LocalEngine
    serving: Serving
    store: SessionStore
    info: pb.GetServerInfoResponse


def build(config: ServerConfig, model: LoadedModel | None = None) -> Parts:
    """Loads the model, or takes one, and makes everything up to the sessions.

    Raises ModelRefused, TokenizerError, SettingsError, and MemoryError when there is no room for a pool.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    if model is None:
        device = choose_device(config.device)
        path = EMBEDDED.get(config.model, config.model)
        model = load(str(path), choose_dtype(config.dtype, device), device)
    tokenizer = TextTokenizer.from_dir(model.path)
    format = select_format(
        tokenizer,
        model.config.model_type,
        load_renderer(model.path),
        model.config.vocab_size,
        _stop_ids(model.config.eos_token_id),
    )
    num_slots = choose_slots(config, model)
    max_context = choose_context(config, model, num_slots)
    chunks = choose_chunks(config, model.device)
    max_replacement = choose_replacement(config, max_context)
    _log.info(what_fits(model, num_slots, max_context, chunks, config.max_sessions, config.max_running))
    engine = LocalEngine(
        model,
        num_slots,
        chunks[0],
        config.max_queue,
        min(tokenizer.vocab_size, model.config.vocab_size),
        max_context,
        config.max_running,
        alone_chunk=chunks[1],
        chunk_budget=int(config.content_share * num_slots),
    )
    limits = pb.Limits(
        max_context=max_context,
        num_slots=num_slots,
        max_replacement=max_replacement,
        max_directives=config.max_directives,
        max_sessions=config.max_sessions,
        max_queue=config.max_queue,
        max_id_bytes=MAX_ID_BYTES,
        max_message_bytes=MAX_MESSAGE_BYTES,
        sink_tokens=SINK_TOKENS,
        max_stop_strings=16,
    )
    serving = Serving(
        engine,
        format,
        limits,
        model.digest,
        config.default_max_tokens,
        config.session_ttl,
        lambda: PlainStream(tokenizer),
    )
    info = _info(config, model, format, limits)
    if config.canary != "off":
        info.canary.CopyFrom(_canary(config, Lab(engine, format, model)))
    # An engine learns from its canary that it should not.
    info.supports.extend(_supports(format, engine))
    store = SessionStore(serving, config.remembered_requests)
    return Parts(config, model, engine, serving, store, info)


def _canary(config: ServerConfig, lab: Lab) -> pb.Canary:
    """Runs it; where it fails and that is to have consequences, the engine refuses AMORTIZE from now on."""
    if lab.engine.amortize_refused:
        return pb.Canary(skipped=lab.engine.amortize_refused)
    _log.info("the canary runs")
    try:
        report = canary.run(lab, config.canary_agreement)
        told = pb.Canary(passed=report.passed, **asdict(report))
    except (LabError, Refusal, torch.OutOfMemoryError) as error:
        told = pb.Canary(threshold=config.canary_agreement, failures=[f"it could not run: {error}"])
    for failure in told.failures:
        _log.warning("canary: %s", failure)
    if told.skipped:
        _log.warning("canary: no agreement was measured: %s", told.skipped)
    if told.failures and config.canary == "refuse":
        lab.engine.amortize_refused = "; ".join(["its canary failed", *told.failures])
    return told


class Server:
    """A built server on its way: `start`, then `wait` or `stop`. Lives on one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self.crashed = False
        self._thread = EngineThread(parts.engine, parts.store.expire, self._engine_crashed)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.so_reuseport", 0),
            ]
        )
        service = LeylineService(
            self._thread,
            Host(parts.serving, parts.store),
            parts.serving,
            parts.info,
            parts.config.api_keys,
        )
        leyline_pb2_grpc.add_LeylineServicer_to_server(service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        self.address = ""

    async def start(self) -> None:
        """Listens. Raises RuntimeError when the address is taken."""
        config = self._parts.config
        port = self._grpc.add_insecure_port(f"{config.host}:{config.port}")
        self.address = f"{config.host}:{port}"
        self._thread.start()
        await self._grpc.start()
        for name in ("", _SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def wait(self) -> None:
        """Until `stop` was called or the engine crashed."""
        await self._stopped.wait()

    def request_stop(self) -> None:
        self._stopped.set()

    async def stop(self) -> None:
        """Drains: refuses new calls, lets running ones end for `drain` seconds, then cancels them."""
        self._parts.store.closing = True
        await self._health.enter_graceful_shutdown()
        end = self._loop.time() + self._parts.config.drain
        # gRPC goes on listening meanwhile, so that a new call is told why it is refused: what gRPC itself refuses
        # once it stops can reach the client as a cancellation, which nobody retries.
        await self._until_idle(end)
        if await self._computes():
            # Their clients get what was generated so far, as CANCELLED, before the connection goes.
            self._thread.submit(self._parts.store.cancel_all)
            end = self._loop.time() + _CANCEL_S
            await self._until_idle(end)
        await self._grpc.stop(0.0 if self.crashed else max(0.0, end - self._loop.time()))
        await asyncio.to_thread(self._thread.stop)

    async def _until_idle(self, end: float) -> None:
        while self._loop.time() < end and await self._computes():
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _computes(self) -> bool:
        """Whether a request runs or waits for slots."""
        try:
            stats = await asyncio.wrap_future(self._thread.submit(self._parts.engine.stats))
        except RuntimeError:  # the engine's thread has ended
            return False
        return bool(stats.running or stats.queued)

    def _engine_crashed(self) -> None:
        self.crashed = True
        self._loop.call_soon_threadsafe(self._stopped.set)


def _stop_ids(eos: int | list[int] | None) -> frozenset[int]:
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _info(
    config: ServerConfig, model: LoadedModel, format: ServedFormat, limits: pb.Limits
) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(
        model=pb.ModelInfo(
            name=config.model,
            architecture=model.config.model_type,
            digest=model.digest,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            vocab_size=model.config.vocab_size,
            rotary_layout=model.rotary.layout or "",
            chat_format=format.name,
        ),
        limits=limits,
        server_version=_version(),
    )


def _supports(format: ServedFormat, engine: LocalEngine) -> list[pb.Support]:
    lacking = format.lacking
    reasons = {
        "APPEND": "",
        "FORGET": "",
        "AMORTIZE": engine.amortize_refused,
        "CONTENT_REUSE": engine.content_reuse_refused,
        "REPAIR_SHARE": engine.amortize_refused or engine.repair_share_refused,
        "MESSAGES": lacking.get("MESSAGES", ""),
        "TOOLS": lacking.get("TOOLS", ""),
        "REASONING": lacking.get("REASONING", ""),
        "CONSTRAINED_OUTPUT": "sampling has no grammar",
    }
    supports = [pb.Support(feature=f, supported=not why, reason=why) for f, why in reasons.items()]
    return supports + [
        pb.Support(feature="TEMPLATE", supported=False, reason=difference) for difference in format.differences
    ]


def _version() -> str:
    try:
        return metadata.version("leyline")
    except metadata.PackageNotFoundError:
        return "uninstalled"
