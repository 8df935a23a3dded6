"""The engine's thread: everything that touches sessions, cache or model runs here, one thing after another.

Owns the thread and its queue of calls. Calls run between steps, so an edit always lands between two of them and no
state needs a lock. It does not know what the calls do.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from leyline_server.engine.engine import Engine

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class EngineThread:
    """`idle` is called about once in `idle_s` seconds, between steps. `crashed` is called once if a step raises, which
    it never should: the thread then ends and refuses all further calls."""

    def __init__(
        self, engine: Engine, idle: Callable[[], object], crashed: Callable[[], None], idle_s: float = 1.0
    ) -> None:
        self._engine, self._idle, self._crashed, self._idle_s = engine, idle, crashed, idle_s
        self._idle_next = 0.0
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="leyline-engine", daemon=True)
        self._wakes: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self.alive = True

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Runs `call` between two steps. Any thread may submit."""
        future: Future[Result] = Future()
        if not self.alive:
            future.set_exception(RuntimeError("the engine's thread has ended"))
            return future
        self._calls.put((call, future))
        if not self.alive:  # it ended in between
            self._refuse_rest()
        return future

    def wake(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Runs `callback` on `loop` once the step or call of which this is a part is over: with all others of it, so
        that the loop wakes once. On the engine's thread alone."""
        self._wakes.setdefault(loop, []).append(callback)

    def stop(self) -> None:
        """Ends the thread after the calls that were submitted before; waits for it."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take(block=not self._step()):
                pass
        except Exception:
            _log.critical("the engine failed; the server can't go on", exc_info=True)
            self._crashed()
        finally:
            self.alive = False
            self._wake_loops()
            self._refuse_rest()

    def _step(self) -> bool:
        acted = self._engine.step()
        self._wake_loops()
        return acted

    def _wake_loops(self) -> None:
        wakes, self._wakes = self._wakes, {}
        for loop, callbacks in wakes.items():
            if not loop.is_closed():  # else nobody is left to read
                loop.call_soon_threadsafe(_run_all, callbacks)

    def _take(self, block: bool) -> bool:
        """Runs the calls that wait; with `block`, waits for one. False at the end."""
        try:
            item = self._calls.get(timeout=self._idle_s) if block else self._calls.get_nowait()
            while item is not None:
                _settle(*item)
                self._wake_loops()
                item = self._calls.get_nowait()
            return False
        except queue.Empty:
            if time.monotonic() >= self._idle_next:
                self._idle()
                self._idle_next = time.monotonic() + self._idle_s
            return True

    def _refuse_rest(self) -> None:
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None:
                item[1].set_exception(RuntimeError("the engine's thread has ended"))


def _run_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _settle(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
