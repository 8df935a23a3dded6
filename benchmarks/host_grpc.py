"""Whole calls on loopback against a real server, up to where the model would compute.

A hook in front of the model notes when the first forward pass of a Generate would begin, and stops it there; the
entries then get their rows from the books. So a Generate's host work is timed without the model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import logging
import pstats
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import grpc

import leyline_server.engine.stepper as stepper
from benchmarks.host_latency import ADDED, CASES, CUT, OTHERS, fill, parts_of, random_ids, timed
from leyline_proto import leyline_pb2 as pb
from leyline_proto import leyline_pb2_grpc
from leyline_server.server import Server

MESSAGES = 100  # in the session


class _NotRun(Exception):
    """The forward pass that would begin now."""


def calls(profile: bool) -> None:
    logging.disable(logging.CRITICAL)  # every Generate fails, on purpose
    print("| pool | tokens | sessions | call | ms |\n| --- | --- | --- | --- | --- |", flush=True)
    for num_slots, length, num_sessions in CASES:
        asyncio.run(_case(num_slots, length, num_sessions, profile))


async def _case(num_slots: int, length: int, num_sessions: int, profile: bool) -> None:
    parts = parts_of(num_slots)
    server = Server(parts)
    profiler = cProfile.Profile()
    with mock.patch.object(stepper.Stepper, "_prefill", _reached):
        await server.start()
        engine = parts.engine

        def on_engine(call: Callable[[], Any]) -> Any:
            return server._thread.submit(call).result()

        def work() -> dict[str, float]:
            with grpc.insecure_channel(server.address) as channel:
                calls = _Calls(leyline_pb2_grpc.LeylineStub(channel))  # type: ignore[no-untyped-call]
                for index in range(num_sessions):
                    calls.create(f"s{index}", length if index == 0 else OTHERS, index)
                    on_engine(lambda: fill(engine, max(engine.sequences)))
                main = min(engine.sequences)
                if profile:
                    on_engine(profiler.enable)
                out = calls.measure(lambda: on_engine(lambda: fill(engine, main)))
                if profile:
                    on_engine(profiler.disable)
                return out

        for name, took in (await asyncio.to_thread(work)).items():
            print(f"| {num_slots} | {length} | {num_sessions} | {name} | {took:.3f} |", flush=True)
        await server._grpc.stop(0)
        await asyncio.to_thread(server._thread.stop)
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


reached: list[float] = []


def _reached(self: stepper.Stepper, shares: Any) -> Any:
    reached.append(time.perf_counter())
    raise _NotRun


class _Calls:
    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._number = 0

    def _id(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def create(self, session_id: str, length: int, seed: int) -> None:
        """A session of 100 messages without roles."""
        self._stub.CreateSession(pb.CreateSessionRequest(session_id=session_id, request_id=self._id()))
        share, rest = divmod(length, MESSAGES)
        ids = random_ids(length, seed)
        for index in range(MESSAGES):
            end = (index + 1) * share + (rest if index == MESSAGES - 1 else 0)
            self.append(session_id, ids[index * share : end])

    def append(self, session_id: str, ids: list[int]) -> Any:
        tokens = pb.TokenIds(ids=ids)
        return self._stub.Append(pb.AppendRequest(session_id=session_id, request_id=self._id(), token_ids=tokens))

    def apply(self, mode: pb.Mode.ValueType, start: int, dry_run: bool = False) -> Any:
        replacement = pb.TokenIds(ids=(7, 8, 9))
        end = start + CUT // 4
        span = pb.Span(start=start, end=end)
        directive = pb.Directive(span=span, mode=mode, token_ids=replacement)
        return self._stub.ApplyDirectives(
            pb.ApplyDirectivesRequest(session_id="s0", request_id=self._id(), directives=[directive], dry_run=dry_run)
        )

    def measure(self, put_back: Callable[[], Any]) -> dict[str, float]:
        out: dict[str, float] = {}
        length = self._stub.GetSession(pb.GetSessionRequest(session_id="s0")).session.num_tokens
        at = length // MESSAGES * (MESSAGES // 2) + 2
        last: list[str] = []

        def amortize() -> None:
            last[:] = [self.apply(pb.MODE_AMORTIZE, at).receipts[0].edit_id]

        def undo() -> None:
            self._stub.Undo(pb.UndoRequest(session_id="s0", request_id=self._id(), edit_id=last[0]))

        out["GetServerInfo"] = timed(lambda: self._stub.GetServerInfo(pb.GetServerInfoRequest()))
        out["ApplyDirectives, dry run"] = timed(lambda: self.apply(pb.MODE_AMORTIZE, at, True))
        out["ApplyDirectives, AMORTIZE"] = timed(amortize, undo)
        out["Append 64"] = timed(lambda: self.append("s0", random_ids(ADDED, 5)), put_back)
        begun: list[float] = []

        def generate() -> None:
            self.append("s0", random_ids(ADDED, 6))
            begun.append(time.perf_counter())
            request = pb.GenerateRequest(session_id="s0", request_id=self._id(), max_tokens=4, raw=True)
            with contextlib.suppress(grpc.RpcError):
                list(self._stub.Generate(request))

        reached.clear()
        timed(generate, put_back)
        took = sorted(end - start for start, end in zip(begun, reached, strict=True))
        out["Generate, to the first forward"] = took[len(took) // 2] * 1e3
        out["ApplyDirectives, FORGET"] = timed(lambda: self.apply(pb.MODE_FORGET, at), put_back, 20)
        return out
