"""The expanded form's choices, measured: `python -m benchmarks.tune_prefill`. What follows stands in `gpu/prefill.py`.

One attention layer of DeepSeek-V2-Lite's shape, random weights, bf16. Each arm is checked against the twin in fp32,
then timed. TFLOP/s count what causality leaves: 2 * heads * (nope + rope + v) for each query and entry it sees.
Sections fail one by one: a traceback stands in the place of its figures. What doesn't fit into LIMIT_S is skipped,
and said. `--smoke`: tiny, without times, to run it on a CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.prefill_layer import DEVICE, NOPE, RANK, ROPE, SCALE, SMOKE, H, Layer, V
from leyline_kernels import reference
from leyline_kernels.gpu import prefill as gpu
from leyline_kernels.gpu.gather import gather

TOLERANCE = 5e-6 if SMOKE else 8e-3
LIMIT_S = 85.0
STARTED = time.monotonic()

CASES = ((24, 24), (8, 40)) if SMOKE else ((32768, 32768), (2048, 32768), (8192, 8192))
"""Queries, the last ones, over entries."""
COUNTS = (3,) if SMOKE else (16, 32, 64, 128, 192, 256, 384, 512, 1024)
PACKS = ((24,), (24, 9)) if SMOKE else ((8192,), (32768,), (32768, 8192, 4096, 1024))
"""Lengths of the sequences that get COUNTS queries each."""
HOLES = (40,) if SMOKE else (16384, 32768)
"""Entries of lists of which ten content hits cover four fifths: half of the queries in front, some behind each hit."""
SWEEP = (
    gpu.LONG,
    gpu.Tiles(block_m=128, block_n=64, num_warps=8, num_stages=3),
    gpu.Tiles(block_m=128, block_n=64, num_warps=8, num_stages=2),
    gpu.Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2),
    gpu.Tiles(block_m=64, block_n=128, num_warps=4, num_stages=2),
)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def require(error: float, limit: float, what: str) -> None:
    if not error < limit:
        raise AssertionError(f"{what}: off by {error:.1e}, at most {limit:.1e} expected")


def measure(run: Callable[[], Any], long: bool = False) -> float:
    """Median milliseconds: of calls (long ones: the host's part doesn't show), else of replays of a CUDA graph."""
    if SMOKE:
        run()
        return 1.0
    if long:
        return float(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"))
    run()
    return float(triton.testing.do_bench_cudagraph(run, rep=10, return_mode="median"))


def section(title: str, run: Callable[[], None]) -> None:
    print(f"\n== {title} ({time.monotonic() - STARTED:.0f} s)", flush=True)
    try:
        run()
    except Exception:
        traceback.print_exc(file=sys.stdout)


def in_time(what: str) -> bool:
    """Whether another figure still fits into the limit."""
    late = time.monotonic() - STARTED > LIMIT_S
    if late:
        print(f"skipped, no time left: {what}")
    return not late


def failed(failure: BaseException) -> str:
    return f"failed: {type(failure).__name__}: {str(failure)[:300]}"


def compile_all() -> None:
    """Every variant that the sections launch, in parallel on the host."""
    one, four = Layer((256,), (130,)), Layer((256, 40, 256, 7), (130, 1, 33, 7))
    jobs: list[Callable[[], Any]] = [one.absorbed, four.absorbed]
    for layer, tiles, splits in (
        *((one, tiles, 1) for tiles in SWEEP),
        *((one, gpu.LONG, splits) for splits in (2, 4, 8)),
        *((one, gpu.SHORT, splits) for splits in (8, 16)),
        *((four, gpu.LONG, splits) for splits in (1, 2)),
        *((four, gpu.SHORT, splits) for splits in (2, 4)),
    ):
        jobs.append(partial(layer.attend, *layer.expand(), tiles=tiles, num_splits=splits))
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job) for job in jobs]
    for job in running:
        if (failure := job.exception()) is not None:
            print(f"a variant {failed(failure)}")
    torch.cuda.synchronize()


def checks() -> None:
    lens, counts = ((24, 9), (7, 9)) if SMOKE else ((4096, 3000, 500), (1024, 300, 1))
    for gaps in (False, True):
        layer = Layer(lens, counts, gaps)
        kv, keys = layer.expand()
        want_kv, want_keys = layer.expand(reference)
        require(relative_error(kv, want_kv), TOLERANCE, "gather, latents")
        require(relative_error(keys, want_keys), TOLERANCE, "gather, keys")
        want = layer.want(kv, keys)
        error, absorbed = relative_error(layer.attend(kv, keys), want), relative_error(layer.absorbed(), want)
        print(f"gaps={gaps}: prefill off by {error:.1e}, absorbed against expanded {absorbed:.1e}")
        require(error, TOLERANCE, "prefill")
        require(absorbed, 2 * TOLERANCE, "absorbed against expanded")


def gathers() -> None:
    for n in (24,) if SMOKE else (2048, 8192, 32768, 131072):
        layer = Layer((n,), (1,))
        size = 2 * n * (RANK + ROPE) * layer.c_kv.element_size()
        rows = torch.empty(2, size // 2, dtype=torch.uint8, device=DEVICE)
        copy = measure(partial(rows[0].copy_, rows[1]))
        line = f"{n:7d} entries: copy {size / copy * 1e-6:7.0f} GB/s"
        mixed = torch.randint(-9999, 9999, (n,), device=DEVICE).int()
        for name, delta in (("no deltas", None), ("runs", layer.kv_delta), ("all differ", mixed)):
            took = measure(partial(
                gather, layer.c_kv, layer.k_pe, layer.kv_slots, delta, layer.inv_freq, "interleaved"
            ))  # fmt: skip
            line += f", {name} {size / took * 1e-6:7.0f} GB/s ({took * 1e3:.1f} us)"
        print(line, flush=True)
    print("(short lists stay in L2: the copy beside them says what that gives)")


def checked(tiles: gpu.Tiles) -> float:
    """Error of a choice on a case small enough for the twin."""
    layer = Layer((20,), (13,), gaps=True) if SMOKE else Layer((3000,), (700,), gaps=True)
    kv, keys = layer.expand()
    return relative_error(layer.attend(kv, keys, tiles=tiles, num_splits=1), layer.want(kv, keys))


def rate(layer: Layer, took_ms: float) -> str:
    return f"{took_ms:8.3f} ms {layer.tflop / took_ms * 1e3:6.0f} TFLOP/s"


def sweep() -> None:
    layers = [Layer((n,), (t,)) for t, n in CASES]
    expanded = [layer.expand() for layer in layers]

    def line(name: str, tiles: gpu.Tiles) -> None:
        if not in_time(name):
            return
        try:
            error = checked(tiles)
            require(error, TOLERANCE, name)
            runs = [partial(layer.attend, *rows, tiles=tiles) for layer, rows in zip(layers, expanded, strict=True)]
            cells = [rate(layer, measure(run, long=True)) for layer, run in zip(layers, runs, strict=True)]
        except Exception as failure:
            cells, error = [failed(failure)], float("nan")
        print(f"{name:40s} off {error:.0e} | " + " | ".join(cells), flush=True)

    print(" " * 51 + "| " + " | ".join(f"{f'{t} over {n}':>28s}" for t, n in CASES))
    for tiles in (gpu.EXACT,) if SMOKE else SWEEP:
        line(f"m={tiles.block_m} n={tiles.block_n} warps={tiles.num_warps} stages={tiles.num_stages}", tiles)
    base = gpu.EXACT if SMOKE else gpu.LONG
    for group in (1, 4, 16):
        line(f"first, {group} heads together", replace(base, head_group=group))
    gpu.SETTLE = False
    line("first, SETTLE = False", base)
    gpu.SETTLE = True


def holes() -> None:
    for n in HOLES:
        hit, front = n * 4 // 5 // 10, n // 10
        behind = (n - front) // 10
        computed = torch.ones(n, dtype=torch.bool)
        for at in range(front, front + 10 * behind, behind):
            computed[at : at + hit] = False
        index = computed.nonzero()[:, 0]
        layer = Layer((n,), (len(index),), index=index)
        kv, keys = layer.expand()
        want = layer.attend(kv, keys)
        print(f"{len(index)} over {n} in holes: as chosen {rate(layer, measure(partial(layer.attend, kv, keys)))}")
        for group in (1, 2, 4, 8, 16):
            tiles = replace(gpu.EXACT if SMOKE else gpu.LONG, head_group=group)
            run = partial(layer.attend, kv, keys, tiles=tiles)
            require(relative_error(run(), want), TOLERANCE, f"{group} heads together")
            print(f"  {group:2d} heads together {rate(layer, measure(run))}", flush=True)


def rivals() -> None:
    """torch's attention on a whole prompt: the same products, keys copied to every head, q, k, v contiguous."""
    for t, n in CASES:
        if t != n:
            continue
        layer = Layer((n,), (t,))
        kv, keys = layer.expand()
        q = layer.q.transpose(0, 1)[None].contiguous()
        k = torch.cat([kv[..., :NOPE], keys[:, None].expand(-1, H, -1)], dim=-1).transpose(0, 1)[None].contiguous()
        v = kv[..., NOPE:].transpose(0, 1)[None].contiguous()
        padded = pad(v, (0, NOPE + ROPE - V))
        want = layer.attend(kv, keys)
        print(f"{t} over {n}: leyline {rate(layer, measure(partial(layer.attend, kv, keys), long=True))}", flush=True)
        for name, backend, values in (
            ("cuDNN", SDPBackend.CUDNN_ATTENTION, v),
            ("flash, v padded", SDPBackend.FLASH_ATTENTION, padded),
        ):
            try:
                with sdpa_kernel(backend):
                    run = partial(scaled_dot_product_attention, q, k, values, is_causal=True, scale=SCALE)
                    error = relative_error(run()[0, ..., :V].transpose(0, 1), want)
                    require(error, 2 * TOLERANCE, name)
                    print(f"{t} over {n}: {name} {rate(layer, measure(run, long=True))}", flush=True)
            except Exception as failure:
                print(f"{t} over {n}: {name} {failed(failure)}", flush=True)


def both_forms(name: str, layer: Layer) -> None:
    try:
        require(relative_error(layer.absorbed(), layer.expanded()), 2 * TOLERANCE, "absorbed against expanded")
        absorbed, expanded = measure(layer.absorbed), measure(layer.expanded)
        rows = layer.expand()
        alone = measure(partial(layer.attend, *rows))
    except Exception as failure:
        print(f"{name} {failed(failure)}", flush=True)
        return
    winner = "expanded" if expanded < absorbed else "absorbed"
    print(f"{name}: absorbed {absorbed * 1e3:8.0f} us, expanded {expanded * 1e3:8.0f} us "
          f"(of which attention {alone * 1e3:7.0f}) -> {winner}, {absorbed / expanded:.2f} x", flush=True)  # fmt: skip


def crossing() -> None:
    for lens in PACKS:
        for t in COUNTS:
            name = f"{t:5d} over {' + '.join(map(str, lens))}"
            if in_time(name):
                both_forms(name, Layer(lens, [min(t, n) for n in lens]))


if __name__ == "__main__":
    torch.manual_seed(0)
    where = "cpu, interpreted" if SMOKE else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, triton {triton.__version__}, H={H} nope={NOPE} rope={ROPE} v={V}")
    if not SMOKE:
        section("compiling", compile_all)
    section("checks", checks)
    section("tiles", sweep)
    section("queries in holes", holes)
    section("torch's attention", rivals)
    section("gather against a copy of as many bytes", gathers)
    section("where the expanded form begins to pay", crossing)
    print(f"\n{time.monotonic() - STARTED:.0f} s")
