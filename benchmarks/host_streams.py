"""64 open streams beside an engine that is a clock: what the gRPC front costs a step.

The engine here computes nothing. Like the real one it launches a step, waits for the one before with the GIL released,
and tells every stream its token; a little Python stands for the rest of its work. The clients are another process.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from leyline_proto import leyline_pb2 as pb
from leyline_proto import leyline_pb2_grpc
from leyline_server.config import ServerConfig
from leyline_server.engine.engine import EndReason, EngineStats, GenerateParams, HitReport, Listener, MissReason
from leyline_server.server import Parts, Server, build
from leyline_server.sessions.store import SessionStore

STREAMS, STEP_S, STEPS, WARM = 64, 0.012, 250, 50
WORK = 80_000  # turns of an empty loop: Python's share of a step


@dataclass(eq=False)
class _Running:
    listener: Listener
    ids: list[int]
    left: int

    def cancel(self) -> None:
        self.left = 0


class Clock:
    """An engine whose device takes `STEP_S` for any step. Keeps how long steps took and how long its Python did."""

    amortize_refused = ""

    def __init__(self) -> None:
        self._ids: dict[int, list[int]] = {}
        self._running: list[_Running] = []
        self._done_at = self._begun = 0.0
        self.periods: list[float] = []
        self.worked: list[float] = []
        self.told: list[float] = []
        self.cpu_s = 0.0  # of the engine's thread

    def open(self, namespace: tuple[str, ...]) -> int:
        self._ids[len(self._ids)] = []
        return len(self._ids) - 1

    def close(self, sequence: int) -> int:
        return 0

    def length(self, sequence: int) -> int:
        return len(self._ids[sequence])

    def num_pending(self, sequence: int) -> int:
        return 0

    def exact_upto(self, sequence: int) -> int:
        return 0

    def ids(self, sequence: int, start: int = 0, end: int | None = None) -> list[int]:
        return self._ids[sequence][start:end]

    def append(self, sequence: int, ids: Sequence[int]) -> None:
        self._ids[sequence].extend(ids)

    def truncate(self, sequence: int, length: int) -> None:
        del self._ids[sequence][length:]

    def check_queue(self) -> None:
        return

    def generate(self, sequence: int, params: GenerateParams, listener: Listener) -> _Running:
        self._running.append(_Running(listener, self._ids[sequence], params.max_tokens))
        listener.started(HitReport(0, 0, 0, 1, 0, MissReason.COLD))
        return self._running[-1]

    def stats(self) -> EngineStats:
        return EngineStats(1, 1, 0, 0, len(self._running), 0, 0, 0)

    def add_silent(self, count: int) -> None:
        """Streams that nobody reads, and that cost nothing."""
        self._running += [_Running(_Silent(), [], 1 << 30) for _ in range(count)]

    def step(self) -> bool:
        if not self._running:
            return False
        now = time.perf_counter()
        if self._begun:
            self.periods.append(now - self._begun)
        self._begun = now
        for _ in range(WORK):
            pass
        launched = time.perf_counter()
        self.worked.append(launched - now)
        previous, self._done_at = self._done_at, max(launched, self._done_at) + STEP_S
        time.sleep(max(0.0, previous - launched))
        begun = time.perf_counter()
        for one in list(self._running):
            one.ids.append(300 + len(one.ids) % 700)
            one.left -= 1
            if one.listener.token(one.ids[-1]) or one.left <= 0:
                self._running.remove(one)
                one.listener.ended(EndReason.LENGTH, None)
        self.told.append(time.perf_counter() - begun)
        self.cpu_s = time.thread_time()
        return True


class _Silent:
    def started(self, report: HitReport) -> None: ...

    def token(self, token_id: int) -> bool:
        return False

    def ended(self, reason: EndReason, error: Any) -> None: ...


def streams(intervals: Sequence[float] = (0.005, 0.001, 0.0005, 0.0001)) -> None:
    print("| streams | switch interval ms | step ms | 95 % | Python of a step ms | telling ms ", end="")
    print("| loop CPU ms a step | engine CPU ms a step | messages |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    before = sys.getswitchinterval()
    for interval, attached in [(before, False), *((interval, True) for interval in intervals)]:
        sys.setswitchinterval(interval)
        asyncio.run(_measure(attached, interval))
    sys.setswitchinterval(before)


async def _measure(attached: bool, interval: float) -> None:
    parts, clock = _parts()
    server = Server(parts)
    await server.start()
    try:
        messages, begun = 0, time.thread_time()
        if attached:
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.host_streams", server.address, stdout=subprocess.PIPE
            )
            out, _ = await client.communicate()
            messages = int(out)
        else:
            clock.add_silent(STREAMS)
            await asyncio.sleep(STEP_S * STEPS)
        loop_ms = (time.thread_time() - begun) * 1e3 / len(clock.periods)
    finally:
        await server._grpc.stop(0)
        clock._running.clear()
        await asyncio.to_thread(server._thread.stop)
    told, periods, worked = (values[WARM:STEPS] for values in (clock.told, clock.periods, clock.worked))
    engine_ms = clock.cpu_s * 1e3 / len(clock.periods)
    tail = sorted(periods)[int(0.95 * len(periods))]
    middle = [statistics.median(values) * 1e3 for values in (worked, told)]
    print(
        f"| {STREAMS if attached else 0} | {interval * 1e3:.1f} | {statistics.mean(periods) * 1e3:.2f} | "
        f"{tail * 1e3:.2f} | {middle[0]:.2f} | {middle[1]:.2f} | {loop_ms:.2f} | {engine_ms:.2f} | {messages} |",
        flush=True,
    )


def _parts() -> tuple[Parts, Clock]:
    parts = build(ServerConfig(port=0, slots=4096, threads=1, device="cpu", dtype="float32"))
    clock = Clock()
    engine: Any = clock
    serving = replace(parts.serving, engine=engine)
    return replace(parts, engine=engine, serving=serving, store=SessionStore(serving, 64)), clock


async def _client(address: str) -> None:
    """Reads all streams to their ends, as fast as it can; prints how many messages came."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = leyline_pb2_grpc.LeylineStub(channel)  # type: ignore[no-untyped-call]
        for index in range(STREAMS):
            message = pb.Message(role=pb.ROLE_USER, content="hello")
            create = pb.CreateSessionRequest(session_id=f"s{index}", request_id=f"c{index}", messages=[message])
            await stub.CreateSession(create)

        async def read(index: int) -> int:
            request = pb.GenerateRequest(
                session_id=f"s{index}", request_id=f"g{index}", max_tokens=STEPS + 20, ignore_eos=True, raw=True
            )
            count = 0
            async for _ in stub.Generate(request):
                count += 1
            return count

        print(sum(await asyncio.gather(*(read(index) for index in range(STREAMS)))))


if __name__ == "__main__":
    asyncio.run(_client(sys.argv[1]))
