"""Arms of a kernel's tuning: checked against a twin, timed, ranked beside the speed of a copy.

An arm that fails is printed and left out; what doesn't fit into LIMIT_S is skipped, and said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from leyline_kernels.gpu.rotate import Blocks
from leyline_kernels.gpu.split import Tiling

DEVICE = "cuda"
LIMIT_S = 95.0
STARTED = time.monotonic()
TOLERANCE = 8e-3

Arm = Tiling | Blocks
T = TypeVar("T", bound=Arm)


def passed() -> float:
    """Seconds since the start."""
    return time.monotonic() - STARTED


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def microseconds(run: Callable[[int], Any], layers: int) -> float:
    """Median over replays of a CUDA graph of at least four calls, each on the next layer."""
    calls = max(4, layers)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(call % layers)
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[len(times) // 2]


def deadline(share: float) -> float:
    """Seconds after the start by which that share of the time that is left now is spent."""
    now = passed()
    return now + share * max(0.0, LIMIT_S - now)


def left(until: float) -> bool:
    return passed() < until


def timed(
    choices: Sequence[T], run: Callable[[int, T], Tensor], want: Tensor, layers: int, until: float
) -> Iterator[tuple[float, T]]:
    for done, arm in enumerate(choices):
        if not left(until):
            print(f"  out of time after {done} of {len(choices)} arms")
            return
        try:
            error = relative_error(run(0, arm), want)
            if not error < TOLERANCE:
                print(f"  WRONG {arm}: off by {error:.1e}")
                continue
            yield microseconds(partial(_called, run, arm), layers), arm
        except Exception as error:  # printed, and the sweep goes on
            print(f"  failed {arm}: {str(error).splitlines()[0][:120]}")


def _called(run: Callable[[int, T], Tensor], arm: T, layer: int) -> Tensor:
    return run(layer, arm)


def named(arm: Arm) -> str:
    if isinstance(arm, Blocks):
        return f"n{arm.block_n} programs {arm.programs} warps {arm.num_warps}{' ahead' * arm.ahead}"
    return (
        f"m{arm.block_m} n{arm.block_n} warps {arm.num_warps} stages {arm.num_stages} programs {arm.programs} "
        f"min_tiles {arm.min_tiles} join_parts {arm.join_parts}{' spread' * arm.spread}"
    )


def table(title: str, results: Sequence[tuple[float, Arm]], size_bytes: int, copy: float, best: int = 8) -> None:
    print(f"{title}: the best of {len(results)}")
    for us, arm in sorted(results, key=lambda result: result[0])[:best]:
        rate = size_bytes / us / 1e6
        print(f"  {us:8.1f} us {rate:5.2f} TB/s {100 * rate / copy:4.0f} %  {named(arm)}")


def copy_bandwidth() -> float:
    """TB/s, read and written: of a memcpy or of a kernel that copies, whichever is faster."""
    two = torch.ones(2, 2**29, dtype=torch.bfloat16, device=DEVICE)
    size_bytes = 2 * two[0].nbytes
    memcpy = size_bytes / microseconds(lambda _: two[1].copy_(two[0]), 1) / 1e6
    kernel = size_bytes / microseconds(lambda _: torch.add(two[0], 0, out=two[1]), 1) / 1e6
    print(f"copy {memcpy:.2f} TB/s by memcpy, {kernel:.2f} TB/s by a kernel")
    return max(memcpy, kernel)
