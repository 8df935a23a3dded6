"""How `decode` and `extend` should be tiled, measured: `python -m benchmarks.tune_decode`. What follows stands in
`gpu/decode.py` and `gpu/extend.py`.

One attention layer of DeepSeek-V2-Lite's shape, bf16, random weights, scattered slots, pools rotated so that none is
in the L2 cache. Each tiling is checked against the twin in fp32 before it is timed. TB/s are bytes of rows read once
over time. A configuration that fails is printed and left out; what doesn't fit into LIMIT_S is skipped, and said.
`--builds` measures only what turning costs, in each kernel as it is shipped.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.tuning import (
    DEVICE,
    RANK,
    ROPE,
    ROW_BYTES,
    TOLERANCE,
    H,
    arms,
    at_end,
    copy_bandwidth,
    deadline,
    make,
    microseconds,
    num_layers,
    passed,
    relative_error,
    table,
    widened,
)
from leyline_kernels import reference
from leyline_kernels.gpu import decode as gpu_decode
from leyline_kernels.gpu import extend as gpu_extend
from leyline_kernels.gpu.split import Tiling

COMPILERS = 12
SHARED_BYTES = 227 * 1024

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


def binaries(tilings: list[Tiling]) -> list[Tiling]:
    """One serves any number of programs."""
    return sorted({replace(t, programs=1) for t in tilings}, key=repr)


def compile_all(decodes: list[Tiling], extends: list[Tiling]) -> None:
    jobs = [("decode", turned, t) for t in binaries(decodes) for turned in (True, False)]
    jobs += [("extend", True, t) for t in binaries(extends)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        failures = {failure for failure in pool.map(compile_one, jobs) if failure}
    print(f"compiled {len(jobs)} kernels in {passed():.0f} s")
    for failure in sorted(failures):
        print("  not:", failure)


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


def compare_builds(copy: float) -> None:
    """What is shipped, with all kinds of deltas; on a Hopper GPU also decode's kernel for other GPUs."""
    for seqs, n in SHAPES:
        for deltas in DELTAS:
            layers = num_layers(seqs * n)
            inputs = make([n] * seqs, seqs, deltas, layers)
            want = reference.decode(**widened(inputs[0]))
            for name, tiling in (("shipped", None), ("of any GPU", gpu_decode.BF16)):

                def decode(layer: int, inputs: Any = inputs, n: int = n, tiling: Tiling | None = tiling) -> Tensor:
                    return gpu_decode.decode(**inputs[layer], max_len=n, tiling=tiling)

                _compared(f"decode {seqs} x {n} {deltas}, {name}", decode, want, layers, seqs * n, copy)
            del inputs, want
    n = EXTEND_OVER
    for queries, deltas in product(EXTENDS, DELTAS):
        layers = num_layers(n)
        inputs = [at_end(args, queries, n) for args in make([n], queries, deltas, layers)]
        want = reference.extend(**widened(inputs[0]))

        def extend(layer: int, inputs: Any = inputs) -> Tensor:
            return gpu_extend.extend(**inputs[layer])

        _compared(f"extend {queries} over {n} {deltas}", extend, want, layers, n, copy)


def _compared(title: str, run: Callable[[int], Tensor], want: Tensor, layers: int, entries: int, copy: float) -> None:
    off = relative_error(run(0), want)
    if not off < TOLERANCE:
        print(f"{title}: WRONG, off by {off:.1e}")
        return
    us = microseconds(run, layers)
    rate = entries * ROW_BYTES / us / 1e6
    print(f"{title}: off by {off:.1e}, {us:.1f} us, {rate:.2f} TB/s, {100 * rate / copy:.0f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="How decode and extend should be tiled, measured.")
    parser.add_argument("--builds", action="store_true", help="only what is shipped, with all kinds of deltas")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16, H=16 rank=512 rope=64, random weights")
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s")
    parts: list[Callable[[], None]] = [lambda: compare_builds(copy)]
    if not given.builds:
        decodes, extends = decode_tilings(), extend_tilings()
        parts += [lambda: compile_all(decodes, extends), lambda: tune_decode(copy, decodes)]
        parts += [lambda: tune_extend(copy, extends)]
    for part in parts:
        try:
            part()
        except Exception as error:  # printed, and the other parts still run
            print(f"FAILED: {type(error).__name__}: {error}")
    print(f"{passed():.0f} s")


if __name__ == "__main__":
    main()
