"""Clocks: of calls on a device, of its memory, and of its energy.

Owns how a time is taken. On a GPU a call is timed inside a CUDA graph, so that it is the kernels that are timed and
not their launches; on a CPU by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

WARM_UPS: Final = 3


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_times(call: Callable[[int], Any], device: torch.device, n: int = 30, calls: int = 8) -> list[float]:
    """Seconds of one call, n samples, each the mean of `calls` calls in a row. `call` gets 0, 1, .., calls - 1, so that
    it can work on other data each time; it must not wait for the device."""
    if device.type != "cuda":
        return [_wall(call, index % calls) for index in range(-WARM_UPS, n)][WARM_UPS:]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for index in range(max(WARM_UPS, calls)):
            call(index % calls)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            call(index)
    for _ in range(WARM_UPS):
        graph.replay()
    times = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return times


def _wall(call: Callable[[int], Any], index: int) -> float:
    begun = time.perf_counter()
    call(index)
    return time.perf_counter() - begun


def copy_bandwidth(device: torch.device, size_bytes: int) -> list[float]:
    """Bytes a second that a device-to-device copy reads and writes, as samples: of torch's copy, which is a memcpy, and
    of a kernel that copies, the faster one."""
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copies = (lambda index: target.copy_(source), lambda index: torch.add(source, 0.0, out=target))
    times = min((call_times(copy, device, calls=4) for copy in copies), key=_median)
    return [2 * source.numel() * 4 / seconds for seconds in times]


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


class Energy:
    """The GPU's own energy counter. `joules` is None where there is no GPU, no NVML, or no counter."""

    def __init__(self, device: torch.device) -> None:
        self._read: Callable[[], int] | None = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # what has no counter says so here
        except pynvml.NVMLError:
            return
        self._read = lambda: int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

    def joules(self) -> float | None:
        """Since the driver was loaded; differences count."""
        return None if self._read is None else self._read() / 1e3
