"""What `tune_decode` measures with: inputs of one attention layer of DeepSeek-V2-Lite's shape on a GPU, and the arms of
a sweep, each checked against the twin in fp32 before it is timed. Knows no kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.timing import call_times
from leyline_kernels.gpu.split import Tiling

H, RANK, ROPE = 16, 512, 64
ROW_BYTES = 2 * (RANK + ROPE)
DEVICE = "cuda"
LIMIT_S = 95.0
STARTED = time.monotonic()
TOLERANCE = 8e-3
POOL_BYTES = 130 * 2**20
"""Of all pools that a timing rotates through, at least: more than twice the L2 cache."""


def passed() -> float:
    """Seconds since the start."""
    return time.monotonic() - STARTED


def make(lens: list[int], queries: int, deltas: str, layers: int = 1) -> list[dict[str, Any]]:
    """Arguments of `decode`, for each of several layers."""
    torch.manual_seed(0)
    total, n = sum(lens), max(lens)
    index = torch.arange(total, device=DEVICE)
    by = {
        "unturned": None,
        "uniform": torch.full((total,), -1234, device=DEVICE).int(),
        # About eight cuts a list, as edits leave them.
        "pieces": (-(index % n // (n // 8 + 13)) * 777).int(),
        "all-different": torch.randint(-99_999, 99_999, (total,), device=DEVICE).int(),
    }
    shared = {
        "q_latent": torch.randn(queries, H, RANK, device=DEVICE).bfloat16(),
        "q_pe": torch.randn(queries, H, ROPE, device=DEVICE).bfloat16(),
        "kv_start": torch.tensor([0, *lens[:-1]], device=DEVICE).cumsum(0).int(),
        "kv_len": torch.tensor(lens, device=DEVICE).int(),
        "kv_slots": torch.randperm(total, device=DEVICE).int(),
        "kv_delta": by[deltas],
        "inv_freq": 10_000.0 ** (-torch.arange(0, ROPE, 2, device=DEVICE) / ROPE),
        "layout": "interleaved",
        "scale": (RANK + ROPE) ** -0.5,
    }
    return [
        shared
        | {
            "c_kv": torch.randn(total, RANK, device=DEVICE).bfloat16(),
            "k_pe": torch.randn(total, ROPE, device=DEVICE).bfloat16(),
        }
        for _ in range(layers)
    ]


def at_end(args: dict[str, Any], queries: int, n: int) -> dict[str, Any]:
    where = {
        "q_indptr": torch.tensor([0, queries], device=DEVICE).int(),
        "q_index": torch.arange(n - queries, n, device=DEVICE).int(),
    }
    return args | where


def num_layers(entries: int) -> int:
    return max(1, -(-POOL_BYTES // (entries * ROW_BYTES)))


def widened(args: dict[str, Any]) -> dict[str, Any]:
    return {k: v.float() if k in ("q_latent", "q_pe", "c_kv", "k_pe") else v for k, v in args.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def microseconds(run: Callable[[int], Any], layers: int) -> float:
    """Median of a call, each on the next layer."""
    times = call_times(lambda call: run(call % layers), torch.device(DEVICE), n=7, calls=max(4, layers))
    return 1e6 * statistics.median(times)


def deadline(share: float) -> float:
    """Seconds after the start by which that share of the time that is left now is spent."""
    now = passed()
    return now + share * max(0.0, LIMIT_S - now)


def left(until: float) -> bool:
    return passed() < until


def arms(
    tilings: list[Tiling], run: Callable[[int, Tiling], Tensor], want: Tensor, layers: int, until: float
) -> Iterator[tuple[float, Tiling]]:
    for done, tiling in enumerate(tilings):
        if not left(until):
            print(f"  out of time after {done} of {len(tilings)} tilings")
            return
        try:
            error = relative_error(run(0, tiling), want)
            if not error < TOLERANCE:
                print(f"  WRONG {tiling}: off by {error:.1e}")
                continue

            def one(layer: int, t: Tiling = tiling) -> Tensor:
                return run(layer, t)

            yield microseconds(one, layers), tiling
        except Exception as error:  # printed, and the sweep goes on
            print(f"  failed {tiling}: {str(error).splitlines()[0][:120]}")


def table(title: str, results: list[tuple[float, Tiling]], size_bytes: int, copy: float) -> list[Tiling]:
    """Prints the ten best; returns all, best first."""
    print(f"{title}: {len(results)} tilings")
    results.sort(key=lambda result: result[0])
    for us, t in results[:10]:
        rate = size_bytes / us / 1e6
        print(
            f"  {us:8.1f} us {rate:5.2f} TB/s {100 * rate / copy:4.0f} %  m{t.block_m} n{t.block_n} "
            f"warps {t.num_warps} stages {t.num_stages} programs {t.programs} min_tiles {t.min_tiles}"
        )
    return [t for _, t in results]


def copy_bandwidth() -> float:
    """TB/s, read and written."""
    return statistics.median(timing.copy_bandwidth(torch.device(DEVICE), 2**30)) / 1e12
