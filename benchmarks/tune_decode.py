"""How `decode` and `extend` should be tiled, measured: `python -m benchmarks.tune_decode`. What follows stands in
`gpu/decode.py` and `gpu/extend.py`.

One attention layer of DeepSeek-V2-Lite's shape, bf16, random weights, scattered slots, pools rotated so that none is
in the L2 cache. Each tiling is checked against the twin in fp32 before it is timed. TB/s are bytes of rows read once
over time. A configuration that fails is printed and left out; what doesn't fit into LIMIT_S is skipped, and said.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from leyline_kernels import reference
from leyline_kernels.gpu import decode as gpu_decode
from leyline_kernels.gpu import extend as gpu_extend
from leyline_kernels.gpu.split import Tiling

H, RANK, ROPE = 16, 512, 64
ROW_BYTES = 2 * (RANK + ROPE)
DEVICE = "cuda"
LIMIT_S = 95.0
STARTED = time.monotonic()
TOLERANCE = 8e-3
COMPILERS = 12
SHARED_BYTES = 227 * 1024
POOL_BYTES = 130 * 2**20
"""Of all pools that a timing rotates through, at least: more than twice the L2 cache."""

SHAPES = ((16, 32768), (16, 8192), (1, 8192), (1, 32768))
DELTAS = ("unturned", "uniform", "pieces", "all-different")
EXTENDS = (16, 64, 128)
EXTEND_OVER = 32768


def fits(tiling: Tiling, rows: int) -> bool:
    """Whether the queries and the tiles in flight leave the programs of a processor enough shared memory."""
    # A block of 64 rows multiplies asynchronously, from one tile more.
    tiles = (tiling.num_stages - (0 if rows >= 64 else 1)) * tiling.block_n * ROW_BYTES
    programs = min(tiling.programs, 65536 // (tiling.num_warps * 32 * 168) or 1)
    return programs * (tiles + rows * ROW_BYTES + 4096) <= SHARED_BYTES


def decode_tilings() -> list[Tiling]:
    # One stage loads nothing ahead; two leave it to the other programs of the processor. Compiled for sm_90, tiles of
    # more than 8 entries a warp spill.
    every = product((16, 32, 64), (4, 8), (2, 3, 4), (1, 2, 3, 4))
    tilings = [Tiling(n, warps, stages, programs) for n, warps, stages, programs in every]
    return [t for t in tilings if t.block_n <= 8 * t.num_warps and fits(t, H)]


def extend_tilings() -> list[Tiling]:
    # With four warps the sums spill.
    every = product((32, 64), (32, 64), (8,), (2, 3, 4), (1, 2))
    tilings = [Tiling(n, warps, stages, programs, block_m=m) for m, n, warps, stages, programs in every]
    return [t for t in tilings if fits(t, t.block_m)]


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


def compile_one(job: tuple[str, bool, Tiling]) -> str:
    """In a process of its own: leaves the compiled kernel in Triton's cache. Returns what went wrong."""
    kind, turned, tiling = job
    try:
        args = make([64] * 16, 16, "uniform" if turned else "unturned")[0]
        if kind == "decode":
            gpu_decode.decode(**args, tiling=tiling)
        else:
            where = torch.arange(17, device=DEVICE).int()
            gpu_extend.extend(**args, q_indptr=where, q_index=args["kv_len"] - 1, tiling=tiling)
        torch.cuda.synchronize()
    except Exception as error:  # a configuration out of registers or shared memory is a result here
        return f"{kind} {tiling}: {str(error).splitlines()[0][:120]}"
    return ""


def compile_all(decodes: list[Tiling], extends: list[Tiling]) -> None:
    # One binary serves any number of programs.
    binaries = sorted({replace(t, programs=1) for t in decodes}, key=repr)
    jobs = [("decode", turned, t) for t in binaries for turned in (True, False)]
    jobs += [("extend", True, t) for t in sorted({replace(t, programs=1) for t in extends}, key=repr)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        failures = {failure for failure in pool.map(compile_one, jobs) if failure}
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - STARTED:.0f} s")
    for failure in sorted(failures):
        print("  not:", failure)


def deadline(share: float) -> float:
    """Seconds after the start by which that share of the time that is left now is spent."""
    now = time.monotonic() - STARTED
    return now + share * max(0.0, LIMIT_S - now)


def left(until: float) -> bool:
    return time.monotonic() - STARTED < until


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
            yield microseconds(lambda layer, t=tiling: run(layer, t), layers), tiling
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


def one_input(args: dict[str, Any], _: int, tiling: Tiling) -> Tensor:
    return gpu_decode.decode(**args, tiling=tiling)


def tune_decode(copy: float, tilings: list[Tiling]) -> None:
    """Every tiling turned by pieces; of the best twelve all kinds of deltas; of the best four, other min_tiles."""
    for seqs, n in SHAPES:
        best = tilings
        until = deadline(0.25)
        for deltas in ("pieces", "unturned", "uniform", "all-different"):
            layers = num_layers(seqs * n)
            inputs = make([n] * seqs, seqs, deltas, layers)
            want = reference.decode(**widened(inputs[0]))

            def run(layer: int, tiling: Tiling, inputs: list[dict[str, Any]] = inputs, n: int = n) -> Tensor:
                return gpu_decode.decode(**inputs[layer], max_len=n, tiling=tiling)

            results = list(arms(best, run, want, layers, until))
            ranked = table(f"decode {seqs} x {n} {deltas}", results, seqs * n * ROW_BYTES, copy)
            if deltas == "pieces":
                best = ranked[:12]
            del inputs, want
    for seqs, n in ((1, 8192), (16, 8192)):
        layers = num_layers(seqs * n)
        inputs = make([n] * seqs, seqs, "pieces", layers)
        some = [replace(gpu_decode.BF16, min_tiles=tiles) for tiles in (1, 2, 4, 8, 16)]
        want = reference.decode(**widened(inputs[0]))

        def again(layer: int, tiling: Tiling, inputs: list[dict[str, Any]] = inputs) -> Tensor:
            return gpu_decode.decode(**inputs[layer], tiling=tiling)

        results = list(arms(some, again, want, layers, deadline(0.2)))
        table(f"decode {seqs} x {n} pieces, min_tiles", results, seqs * n * ROW_BYTES, copy)
    lens = [120_000, 9000, 1, 300, 32768, 40, 2000, 500]
    inputs = make(lens, len(lens), "pieces")
    want = reference.decode(**widened(inputs[0]))
    run_mixed = partial(one_input, inputs[0])
    results = list(arms([gpu_decode.BF16], run_mixed, want, 1, deadline(0.2)))
    table(f"decode of lengths {lens}", results, sum(lens) * ROW_BYTES, copy)


def tune_extend(copy: float, tilings: list[Tiling]) -> None:
    n = EXTEND_OVER
    for queries in EXTENDS:
        layers = num_layers(n)
        inputs = [at_end(args, queries, n) for args in make([n], queries, "pieces", layers)]
        want = reference.extend(**widened(inputs[0]))

        def run(layer: int, tiling: Tiling, inputs: list[dict[str, Any]] = inputs) -> Tensor:
            return gpu_extend.extend(**inputs[layer], tiling=tiling)

        results = list(arms(tilings, run, want, layers, deadline(0.5 if queries != EXTENDS[-1] else 1.0)))
        table(f"extend {queries} over {n} pieces", results, n * ROW_BYTES, copy)
        if results:
            print(f"  {queries * n * H * 2 * (2 * RANK + ROPE) / results[0][0] / 1e6:.0f} TFLOP/s at best")


def copy_bandwidth() -> float:
    """TB/s, read and written, of a kernel that copies: it is faster than torch's copy_, which is a memcpy."""
    source, target = torch.ones(2, 2**29, dtype=torch.bfloat16, device=DEVICE)
    return 2 * 2**30 / microseconds(lambda _: torch.add(source, 0.0, out=target), 1) / 1e6


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16, H=16 rank=512 rope=64, random weights")
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s")
    decodes, extends = decode_tilings(), extend_tilings()
    for part in (
        lambda: compile_all(decodes, extends),
        lambda: tune_decode(copy, decodes),
        lambda: tune_extend(copy, extends),
    ):
        try:
            part()
        except Exception as error:  # printed, and the other parts still run
            print(f"FAILED: {type(error).__name__}: {error}")
    print(f"{time.monotonic() - STARTED:.0f} s")


if __name__ == "__main__":
    main()
