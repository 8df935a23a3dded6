"""How `decode`, `extend` and `rotate` should be tiled, measured: `python -m benchmarks.tune_decode`. What follows
stands in `gpu/decode.py`, `gpu/extend.py` and `gpu/rotate.py`.

One attention layer of DeepSeek-V2-Lite's shape, bf16, random weights, scattered slots, pools rotated so that none is
in the L2 cache; keys are turned in all 27 layers. Each arm is checked against the twin in fp32 before it is timed.
TB/s are bytes of rows read once (and written once, of a rotation) over time.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.tuning import DEVICE, Arm, copy_bandwidth, deadline, named, passed, table, timed
from leyline_kernels import reference
from leyline_kernels.gpu import decode as gpu_decode
from leyline_kernels.gpu import extend as gpu_extend
from leyline_kernels.gpu import rotate as gpu_rotate
from leyline_kernels.gpu.rotate import Blocks
from leyline_kernels.gpu.split import Tiling

H, RANK, ROPE, LAYERS = 16, 512, 64, 27
ROW_BYTES = 2 * (RANK + ROPE)
COMPILERS = 12
POOL_BYTES = 130 * 2**20
"""Of all pools that a timing rotates through, at least: more than twice the L2 cache."""

SHAPES = ((16, 32768), (16, 8192), (1, 8192), (1, 32768))
DELTAS = ("unturned", "uniform", "pieces", "all-different")
MIXED_LENS = [120_000, 9000, 1, 300, 32768, 40, 2000, 500]
EXTENDS = (16, 64, 128)
EXTEND_OVER = 32768
ROTATED = 32768


def decode_tilings(seqs: int) -> list[Tiling]:
    """The neighbourhood of what was fastest. Few sequences also differ in how finely they are split."""
    shapes = ((16, 4, 3), (32, 4, 3), (32, 8, 3), (64, 8, 3), (64, 8, 2))
    tilings = [Tiling(n, w, stages, programs) for (n, w, stages), programs in product(shapes, (1, 2))]
    splits = product((1, 2, 4), (64, 256)) if seqs == 1 else [(1, 64)]
    return [replace(t, min_tiles=tiles, join_parts=parts) for t, (tiles, parts) in product(tilings, splits)]


def extend_tilings() -> list[Tiling]:
    shapes = ((64, 8, 2), (32, 8, 3))
    return [Tiling(n, w, stages, 1, block_m=64, spread=s) for (n, w, stages), s in product(shapes, (False, True))]


def rotate_blocks() -> list[Blocks]:
    # Compiled for sm_90, more entries to a warp spill.
    every = product((32, 64, 128), (1024, 2048, 4096, 8192), (2, 4, 8), (True, False))
    return [b for b in (Blocks(*each) for each in every) if b.block_n <= 16 * b.num_warps]


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


def compile_one(job: tuple[str, bool, Arm]) -> str:
    """In a process of its own: leaves the compiled kernel in Triton's cache. Returns what went wrong."""
    kind, turned, arm = job
    try:
        if isinstance(arm, Blocks):
            rotate_by(*rotation(64), arm)
        else:
            args = make([64] * 16, 16, "uniform" if turned else "unturned")[0]
            if kind == "decode":
                gpu_decode.decode(**args, tiling=arm)
            else:
                where = torch.arange(17, device=DEVICE).int()
                gpu_extend.extend(**args, q_indptr=where, q_index=args["kv_len"] - 1, tiling=arm)
        torch.cuda.synchronize()
    except Exception as error:  # a configuration out of registers or shared memory is a result here
        return f"{kind} {arm}: {str(error).splitlines()[0][:120]}"
    return ""


def compile_all() -> None:
    # One binary serves any number of programs.
    decodes = sorted({replace(t, programs=1) for t in decode_tilings(16)}, key=repr)
    jobs: list[tuple[str, bool, Arm]] = []
    jobs += [("extend", turned, t) for turned in (True, False) for t in extend_tilings()]
    jobs += [("decode", turned, t) for turned in (True, False) for t in decodes]
    jobs += [("rotate", True, b) for b in sorted({replace(b, programs=1) for b in rotate_blocks()}, key=repr)]
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        failures = {failure for failure in pool.map(compile_one, jobs) if failure}
    print(f"compiled {len(jobs)} kernels in {passed():.0f} s")
    for failure in sorted(failures):
        print("  not:", failure)


def of_lens(lens: list[int], deltas: str) -> tuple[Callable[[int, Tiling], Tensor], Tensor, int]:
    """Decode of a layer by a tiling, what it should give for layer 0, and how many layers there are."""
    layers = num_layers(sum(lens))
    inputs = make(lens, len(lens), deltas, layers)
    want = reference.decode(**widened(inputs[0]))

    def run(layer: int, tiling: Tiling) -> Tensor:
        return gpu_decode.decode(**inputs[layer], max_len=max(lens), tiling=tiling)

    return run, want, layers


def shipped(copy: float) -> None:
    """What `decode` does by default."""
    print(f"shipped: {named(gpu_decode.BF16)}")
    batches = [[n] * seqs for seqs, n in SHAPES] + [[16384] * 4, MIXED_LENS]
    for lens in batches:
        name = "mixed lengths" if lens is MIXED_LENS else f"{len(lens)} x {lens[0]}"
        size_bytes = sum(lens) * ROW_BYTES
        alone = 0.0
        for deltas in DELTAS:
            for us, _ in timed([gpu_decode.BF16], *of_lens(lens, deltas), deadline(1.0)):
                alone = alone or us
                rate = size_bytes / us / 1e6
                print(
                    f"  {name:14} {deltas:14} {us:8.1f} us {rate:5.2f} TB/s {100 * rate / copy:4.0f} % of copy, "
                    f"{us / alone:5.3f} of the first"
                )


def tune_decode(copy: float) -> None:
    for seqs, n in SHAPES:
        until = deadline(0.3)
        for deltas in DELTAS:
            results = list(timed(decode_tilings(seqs), *of_lens([n] * seqs, deltas), until))
            table(f"decode {seqs} x {n} {deltas}", results, seqs * n * ROW_BYTES, copy)


def tune_extend(copy: float) -> None:
    n = EXTEND_OVER
    for queries in EXTENDS:
        for deltas in ("pieces", "unturned"):
            layers = num_layers(n)
            inputs = [at_end(args, queries, n) for args in make([n], queries, deltas, layers)]
            want = reference.extend(**widened(inputs[0]))

            def run(layer: int, tiling: Tiling, inputs: list[dict[str, Any]] = inputs) -> Tensor:
                return gpu_extend.extend(**inputs[layer], tiling=tiling)

            results = list(timed(extend_tilings(), run, want, layers, deadline(0.5)))
            table(f"extend {queries} over {n} {deltas}", results, n * ROW_BYTES, copy)
            if results:
                flop = queries * n * H * 2 * (2 * RANK + ROPE)
                print(f"  {flop / min(results, key=lambda r: r[0])[0] / 1e6:.0f} TFLOP/s at best")


def rotation(n: int) -> tuple[Tensor, tuple[Any, ...]]:
    """A pool of 2 n slots and 7 more, and the other arguments of `rotate`."""
    torch.manual_seed(0)
    pool = torch.randn(LAYERS, 2 * n + 7, ROPE, device=DEVICE).bfloat16()
    order = torch.randperm(2 * n + 7, device=DEVICE).int()
    delta = torch.randint(-9999, 9999, (n,), device=DEVICE).int()
    inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device=DEVICE) / ROPE)
    return pool, (order[:n], order[n : 2 * n], delta, inv_freq, "interleaved")


def rotate_by(pool: Tensor, moves: tuple[Any, ...], blocks: Blocks) -> None:
    gpu_rotate.rotate(pool, *moves, blocks)


def tune_rotate(copy: float) -> None:
    pool, moves = rotation(ROTATED)
    written = moves[1].long()
    want = pool.float()
    reference.rotate(want, *moves)
    results = []
    for blocks in [gpu_rotate.BLOCKS, *rotate_blocks()]:
        pool[:, written] = torch.nan

        def run(layer: int, blocks: Blocks) -> Tensor:
            rotate_by(pool, moves, blocks)
            return pool

        results += list(timed([blocks], run, want, 1, deadline(1.0)))
    size_bytes = 2 * LAYERS * ROTATED * ROPE * 2
    table(f"rotate {ROTATED} x {LAYERS} layers, shipped", results[:1], size_bytes, copy)
    table(f"rotate {ROTATED} x {LAYERS} layers", results[1:], size_bytes, copy, best=12)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16, H=16 rank=512 rope=64, random weights")
    copy = copy_bandwidth()
    for part in (
        compile_all,
        lambda: shipped(copy),
        lambda: tune_rotate(copy),
        lambda: tune_decode(copy),
        lambda: tune_extend(copy),
    ):
        try:
            part()
        except Exception as error:  # printed, and the other parts still run
            print(f"FAILED: {type(error).__name__}: {error}")
    print(f"{passed():.0f} s")


if __name__ == "__main__":
    main()
