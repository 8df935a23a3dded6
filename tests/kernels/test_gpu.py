"""The kernels compiled, at DeepSeek-V2-Lite's shape, against the torch twins in fp32 or float64.

As a script, prints a table of times: `PYTHONPATH=kernels python tests/kernels/test_gpu.py`. Random weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

H, RANK, ROPE, LAYERS = 16, 512, 64, 27
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 2e-5}

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
DELTAS = pytest.mark.parametrize("deltas", ["uniform", "pieces", "all-different", None])
LAYOUTS = pytest.mark.parametrize("layout", ["interleaved", "halves"])


def make(
    lens: list[int],
    num_queries: int,
    dtype: torch.dtype,
    layout: str,
    deltas: str | None = "pieces",
    room: int | None = None,
    heads: int = H,
) -> dict[str, Any]:
    """Arguments of `decode` over scattered slots, in a table with room behind each list; unused rows are NaN.

    deltas: "uniform" one delta a list, "pieces" another about every 700 entries, "all-different", None: kv_delta=None.
    """
    device = "cuda"
    total = sum(lens)
    slots = torch.randperm(total + 100, device=device)[:total]
    c_kv = torch.full((total + 100, RANK), torch.nan, dtype=dtype, device=device)
    k_pe = torch.full((total + 100, ROPE), torch.nan, dtype=dtype, device=device)
    c_kv[slots] = torch.randn(total, RANK, dtype=dtype, device=device)
    k_pe[slots] = torch.randn(total, ROPE, dtype=dtype, device=device)
    room = max(lens) + 50 if room is None else room
    start = torch.arange(len(lens), device=device) * room
    place = torch.cat([at + torch.arange(n, device=device) for at, n in zip(start, lens, strict=True)])
    kv_slots = torch.full((len(lens) * room,), -1, dtype=torch.int32, device=device)
    kv_slots[place] = slots.int()
    delta = torch.randint(-99_999, 99_999, (len(lens) * room,), device=device).int()
    if deltas != "all-different":
        run = room if deltas == "uniform" else 701
        delta = delta[torch.arange(len(lens) * room, device=device) // run]
    return {
        "q_latent": torch.randn(num_queries, heads, RANK, dtype=dtype, device=device),
        "q_pe": torch.randn(num_queries, heads, ROPE, dtype=dtype, device=device),
        "c_kv": c_kv,
        "k_pe": k_pe,
        "kv_start": start.int(),
        "kv_len": torch.tensor(lens, device=device).int(),
        "kv_slots": kv_slots,
        "kv_delta": None if deltas is None else delta,
        "inv_freq": 10_000.0 ** (-torch.arange(0, ROPE, 2, device=device) / ROPE),
        "layout": layout,
        "scale": (RANK + ROPE) ** -0.5,
    }


def wider(args: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same arguments, exactly, in the dtype the twin computes in."""
    inputs = ("q_latent", "q_pe", "c_kv", "k_pe")
    return {name: arg.to(WIDER[dtype]) if name in inputs else arg for name, arg in args.items()}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("lens", [[8192], [32768], [8192, 1, 5000, 0, 31], [8000 + i for i in range(16)]], ids=str)
@DELTAS
def test_decode(lens: list[int], deltas: str | None, dtype: torch.dtype, layout: str) -> None:
    args = make(lens, len(lens), dtype, layout, deltas)
    got = leyline_kernels.decode(**args, max_len=max(lens))
    want = reference.decode(**wider(args, dtype))
    error = relative_error(got, want)
    print(f"error decode {lens[0]} x {len(lens)} {deltas} {dtype} {layout}: {error:.1e}")
    assert error < TOLERANCE[dtype]
    assert torch.equal(leyline_kernels.decode(**args, max_len=max(lens)), got)
    if deltas is not None:
        assert relative_error(leyline_kernels.decode(**args | {"kv_delta": None}), want) > 0.05, "rotation off"
        off_by_one = args | {"kv_delta": args["kv_delta"] + 1}
        assert relative_error(leyline_kernels.decode(**off_by_one), want) > 2 * TOLERANCE[dtype], "one position off"


@LAYOUTS
@DTYPES
@pytest.mark.parametrize(("lens", "counts"), [([8192], [512]), ([32768], [64]), ([4096, 7, 900, 2000], [1, 7, 300, 0])])
@DELTAS
def test_extend(lens: list[int], counts: list[int], deltas: str | None, dtype: torch.dtype, layout: str) -> None:
    args = make(lens, sum(counts), dtype, layout, deltas)
    index = [torch.randperm(n, device="cuda")[:count] for n, count in zip(lens, counts, strict=True)]
    args |= {
        "q_indptr": torch.tensor([0, *counts], device="cuda").cumsum(0).int(),
        "q_index": torch.cat(index).int(),
    }
    got, want = leyline_kernels.extend(**args), reference.extend(**wider(args, dtype))
    error = relative_error(got, want)
    print(f"error extend {counts} over {lens} {deltas} {dtype} {layout}: {error:.1e}")
    assert error < TOLERANCE[dtype]
    if deltas is not None:
        assert relative_error(leyline_kernels.extend(**args | {"kv_delta": None}), want) > 0.05, "rotation off"


@LAYOUTS
@DTYPES
def test_rotate(dtype: torch.dtype, layout: str) -> None:
    slots, n = 40_000, 16_384
    pool = torch.randn(LAYERS, slots, ROPE, dtype=dtype, device="cuda")
    order = torch.randperm(slots, device="cuda").int()
    delta = torch.randint(-9999, 9999, (n,), device="cuda").int()
    inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device="cuda") / ROPE)
    want = pool.to(WIDER[dtype])
    for moved in (pool, want):
        moves = (order[:n], order[n : 2 * n], delta, inv_freq, layout)
        (leyline_kernels if moved is pool else reference).rotate(moved, *moves)
    error = relative_error(pool, want)
    print(f"error rotate {dtype} {layout}: {error:.1e}")
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [5, 32, 128])
def test_other_numbers_of_heads(heads: int) -> None:
    """128 as in DeepSeek-V3: two groups of heads to a sequence."""
    lens = [5000, 0, 77, 1]
    args = make(lens, len(lens), torch.bfloat16, "halves", heads=heads)
    want = reference.decode(**wider(args, torch.bfloat16))
    assert relative_error(leyline_kernels.decode(**args), want) < TOLERANCE[torch.bfloat16]


def test_one_graph_serves_all_lengths() -> None:
    """Decode is captured once; then lists, lengths and deltas change in place. Padding sequences give zeros.

    From one entry to all of them in one list: the split of the work follows the lengths.
    """
    args = make([3000, 5000, 0], 3, torch.bfloat16, "interleaved", room=7000)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        leyline_kernels.decode(**args, max_len=8192)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = leyline_kernels.decode(**args, max_len=8192)
    written = args["kv_slots"][args["kv_slots"] >= 0]
    for lens in ([3000, 5000, 0], [1, 6500, 1499], [0, 0, 77], [1, 1, 1], [6999, 16, 17]):
        lists = make(lens, 3, torch.bfloat16, "interleaved")
        args["kv_len"].copy_(lists["kv_len"])
        for b, (start, n) in enumerate(zip(args["kv_start"].tolist(), lens, strict=True)):
            args["kv_slots"][start : start + n] = written[torch.randperm(8000, device="cuda")[:n]]
            args["kv_delta"][start : start + n] = lists["kv_delta"][lists["kv_start"][b] :][:n]
        args["q_latent"].normal_()
        graph.replay()
        assert relative_error(out, reference.decode(**wider(args, torch.bfloat16))) < TOLERANCE[torch.bfloat16]
    args["kv_len"].zero_()
    graph.replay()
    assert out.eq(0).all(), "a batch of padding"


def timings() -> None:
    from triton.testing import do_bench_cudagraph

    def line(name: str, run: Any, size_bytes: float) -> None:
        ms = do_bench_cudagraph(run, rep=60, return_mode="median")
        print(f"{name:44s} {ms * 1e3:9.1f} us {size_bytes / ms / 1e9:7.2f} TB/s")

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16, H=16 rank=512 rope=64")
    two = torch.ones(2, 2**30, dtype=torch.uint8, device="cuda")
    line("copy 1 GiB", lambda: two[1].copy_(two[0]), 2**31)
    row_bytes = 2 * (RANK + ROPE)
    for count, n in ((1, 8192), (1, 32768), (16, 8192), (16, 32768)):
        for name in ("all-different", "pieces", "uniform", None):
            args = make([n] * count, count, torch.bfloat16, "interleaved", name)
            line(f"decode {count} x {n} {name}", lambda a=args, n=n: leyline_kernels.decode(**a, max_len=n),
                 count * n * row_bytes)  # fmt: skip
        halves = make([n] * count, count, torch.bfloat16, "halves")
        line(f"decode {count} x {n} pieces, halves", lambda a=halves, n=n: leyline_kernels.decode(**a, max_len=n),
             count * n * row_bytes)  # fmt: skip
    for queries, n in ((64, 32768), (2048, 8192)):
        args = make([n], queries, torch.bfloat16, "interleaved")
        where = torch.tensor([0, queries], device="cuda").int()
        args |= {"q_indptr": where, "q_index": torch.arange(n - queries, n, device="cuda").int()}
        line(f"extend {queries} over {n}", lambda a=args: leyline_kernels.extend(**a), n * row_bytes)
    for layout in ("interleaved", "halves"):
        pool = torch.randn(LAYERS, 70_000, ROPE, device="cuda").bfloat16()
        order = torch.randperm(70_000, device="cuda").int()
        inv_freq = 10_000.0 ** (-torch.arange(0, ROPE, 2, device="cuda") / ROPE)
        delta = torch.full((32768,), 77, device="cuda").int()
        moves = (order[:32768], order[32768:65536], delta, inv_freq, layout)
        line(f"rotate 32768 x {LAYERS} layers {layout}", lambda pool=pool, m=moves: leyline_kernels.rotate(pool, *m),
             2 * 32768 * LAYERS * ROPE * 2)  # fmt: skip


if __name__ == "__main__":
    timings()
