"""`decode` and `extend` in Triton equal their torch twins, whatever the pool holds where no list points.

fp32 through the interpreter on a CPU, compiled where there is a GPU; bf16 in test_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

TIGHT = 5e-6
"""What fp32 sums in another order differ by, relative."""

WRONG = 0.01
"""Less than any mistake here errs by: keys turned one position too far 0.04."""

LENS = (37, 1, 0, 53)
CASES = [
    (1, 24, 16, 3, "interleaved", "pieces"),
    (3, 40, 32, 1, "halves", "pieces"),
    (3, 40, 32, 2, "halves", "uniform"),
    (6, 128, 64, 2, "interleaved", "all-different"),
    (17, 33, 16, 1, "interleaved", "uniform"),
]
"""heads, rank, rope, programs, layout, deltas."""

MakeBatch = Callable[..., Any]
Measure = Callable[[Tensor, Tensor], float]


def queries(lens: tuple[int, ...], counts: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """q_indptr and q_index: `counts` queries per sequence, at a random subset of its indices in random order."""
    index = [torch.randperm(n, device=device)[:count] for n, count in zip(lens, counts, strict=True)]
    return torch.tensor([0, *counts], device=device).cumsum(0).int(), torch.cat(index).int()


def tiling(programs: int) -> Any:
    """The smallest tiles, and so many programs on the interpreter's one processor."""
    from leyline_kernels.gpu.split import Tiling

    return Tiling(16, num_warps=4, num_stages=1, programs=programs, min_tiles=1)


@pytest.fixture
def kernels(on_triton: None) -> Any:
    from leyline_kernels.gpu.decode import decode
    from leyline_kernels.gpu.extend import extend

    class Kernels:
        pass

    both = Kernels()
    both.decode, both.extend = decode, extend
    return both


@pytest.mark.parametrize(("heads", "rank", "rope", "programs", "layout", "deltas"), CASES)
def test_decode_equals_its_twin(
    heads: int,
    rank: int,
    rope: int,
    programs: int,
    layout: str,
    deltas: str,
    batch: MakeBatch,
    kernels: Any,
    relative_error: Measure,
) -> None:
    b = batch(LENS, heads, rank, rope, layout, deltas=deltas)
    got, want = kernels.decode(**b.args(), tiling=tiling(programs)), reference.decode(**b.args())
    assert relative_error(got, want) < TIGHT
    assert got[2].eq(0).all(), "a sequence without entries"
    for wrong in (None, b.kv_delta + 1, -b.kv_delta):
        assert relative_error(reference.decode(**b.but(kv_delta=wrong).args()), want) > WRONG, "rotation is wrong"


@pytest.mark.parametrize(("heads", "rank", "rope", "programs", "layout", "deltas"), CASES)
def test_extend_equals_its_twin(
    heads: int,
    rank: int,
    rope: int,
    programs: int,
    layout: str,
    deltas: str,
    batch: MakeBatch,
    kernels: Any,
    relative_error: Measure,
    device: str,
) -> None:
    counts = (5, 1, 0, 7)
    b = batch(LENS, heads, rank, rope, layout, num_queries=sum(counts), deltas=deltas)
    q_indptr, q_index = queries(LENS, counts, device)
    args = b.args() | {"q_indptr": q_indptr, "q_index": q_index}
    got, want = kernels.extend(**args, tiling=tiling(programs)), reference.extend(**args)
    assert relative_error(got, want) < TIGHT
    shifted = args | {"q_index": (q_index - 1).clamp(min=0)}
    assert relative_error(reference.extend(**shifted), want) > WRONG, "the causal mask off by one"


@pytest.mark.parametrize("off_by", [1, -1])
def test_keys_turned_one_position_off(
    off_by: int, batch: MakeBatch, kernels: Any, relative_error: Measure, device: str
) -> None:
    """The negative of the tests above: of a uniform delta, and where the delta changes inside a tile."""
    for deltas in ("uniform", "pieces"):
        b = batch((40,), heads=1, deltas=deltas)
        wrong = b.but(kv_delta=b.kv_delta + off_by)
        assert relative_error(kernels.decode(**wrong.args()), reference.decode(**b.args())) > WRONG
        at_end = {"q_indptr": torch.tensor([0, 1], device=device).int(), "q_index": b.kv_len - 1}
        assert relative_error(kernels.extend(**wrong.args(), **at_end), reference.decode(**b.args())) > WRONG


RUNS = {
    "inside a tile": ([40], [5]),
    "at a tile": ([70], [16, 48]),
    "at a chunk of 2, and of 8": ([150], [32, 64, 128]),
    "in each tile of a chunk": ([90], [3, 20, 40, 49, 50, 71]),
    "of one tile among others": ([100], [32, 48]),
    "there and back": ([80], [33, 34]),
    "of the last entry": ([65], [64]),
    "none": ([100], []),
    "several sequences in a piece": ([3, 16, 0, 37, 1, 130], [2, 17, 19, 40, 57, 100]),
}
"""Lengths, and the entries of the whole line at which another delta begins."""


@pytest.mark.parametrize("where", RUNS)
def test_runs_of_one_delta_wherever_they_end(
    where: str, batch: MakeBatch, kernels: Any, relative_error: Measure, device: str
) -> None:
    lens, borders = RUNS[where]
    b = batch(lens, heads=2, rope=32)
    line = torch.arange(sum(lens), device=device)
    run = sum(((line >= border).int() for border in borders), torch.zeros_like(line, dtype=torch.int32))
    by = torch.tensor([-7, 1234, -99, 0], device=device, dtype=torch.int32)[run.long() % 4]
    if where == "there and back":
        by = torch.where(run == 1, 5, -7).int()
    place = torch.cat([start + torch.arange(n) for start, n in zip(b.kv_start.tolist(), lens, strict=True)])
    delta = b.kv_delta.clone()
    delta[place.to(device)] = by
    b = b.but(kv_delta=delta)
    want = reference.decode(**b.args())
    last = {"q_indptr": torch.arange(len(lens) + 1, device=device).int(), "q_index": (b.kv_len - 1).clamp(min=0)}
    for programs in (1, 3):
        each = tiling(programs)
        assert relative_error(kernels.decode(**b.args(), tiling=each), want) < TIGHT
        assert relative_error(kernels.extend(**b.args(), **last, tiling=each), want) < TIGHT
    if borders:
        late = delta.clone()
        late[place.to(device)] = torch.cat([by[:1], by[:-1]])
        off = relative_error(reference.decode(**b.but(kv_delta=late).args()), want)
        assert off > 100 * TIGHT, "borders one entry too late"


def test_16_bits(batch: MakeBatch, kernels: Any, relative_error: Measure) -> None:
    """fp16, because the interpreter can't multiply bf16."""
    for deltas in ("pieces", "uniform"):
        b = batch((40, 70), deltas=deltas, dtype=torch.float16)
        want = reference.decode(**b.args())
        assert relative_error(kernels.decode(**b.args(), tiling=tiling(2)), want) < 2e-3
        assert relative_error(reference.decode(**b.but(kv_delta=b.kv_delta + 1).args()), want) > WRONG


def test_many_short_sequences_find_their_blocks(
    batch: MakeBatch, kernels: Any, relative_error: Measure, device: str
) -> None:
    lens = (3, 0, 18, 1, 9, 2, 40)
    counts = (3, 0, 18, 0, 1, 0, 17)
    b = batch(lens, heads=2, num_queries=sum(counts))
    q_indptr, q_index = queries(lens, counts, device)
    args = b.args() | {"q_indptr": q_indptr, "q_index": q_index}
    assert relative_error(kernels.extend(**args), reference.extend(**args)) < TIGHT


@pytest.mark.parametrize("lens", [(1,), (16,), (17,), (64, 15)])
def test_lengths_at_the_edges_of_tiles(
    lens: tuple[int, ...], batch: MakeBatch, kernels: Any, relative_error: Measure
) -> None:
    b = batch(lens)
    for programs in (1, 5):
        got = kernels.decode(**b.args(), tiling=tiling(programs))
        assert relative_error(got, reference.decode(**b.args())) < TIGHT


def test_a_scrambled_slot_table_gives_the_same_bits(batch: MakeBatch, kernels: Any, device: str) -> None:
    b = batch(LENS)
    # Place j of the table gets slot j, in gaps too: they are not read.
    order = b.kv_slots.long()
    ordered = b.but(
        c_kv=b.c_kv[order],
        k_pe=b.k_pe[order],
        kv_slots=torch.arange(len(order), device=device).int(),
    )
    assert not torch.equal(b.kv_slots, ordered.kv_slots)
    q_indptr = torch.tensor([0, 2, 3, 3, 4], device=device).int()
    q_index = torch.tensor([36, 5, 0, 50], device=device).int()
    where = {"q_indptr": q_indptr, "q_index": q_index}
    for module in (kernels, reference):
        assert torch.equal(module.decode(**b.args()), module.decode(**ordered.args()))
        assert torch.equal(module.extend(**b.args(), **where), module.extend(**ordered.args(), **where))


def test_entries_without_kv_are_never_read(
    batch: MakeBatch, kernels: Any, relative_error: Measure, device: str
) -> None:
    """Pending entries behind the queries hold -1, as do the gaps of the table."""
    lens, counts = (30, 44), (6, 4)
    b = batch(lens, num_queries=sum(counts))
    q_indptr = torch.tensor([0, 6, 10], device=device).int()
    q_index = torch.tensor([3, 0, 11, 8, 5, 2, 17, 18, 19, 20], device=device).int()
    args = b.args() | {"q_indptr": q_indptr, "q_index": q_index}
    want = reference.extend(**args)
    holes = b.kv_slots.clone()
    for start, length, seen in zip(b.kv_start.tolist(), lens, (12, 21), strict=True):
        holes[start + seen : start + length] = -1
    args["kv_slots"] = holes
    # Row -1 is NaN to a pointer (the row in front) and to torch (the last row): if it is read, it shows.
    for pool in ("c_kv", "k_pe"):
        nan = torch.full_like(args[pool][:1], torch.nan)
        args[pool] = torch.cat([nan, args[pool], nan])[1:]
    for extend in (reference.extend, kernels.extend):
        assert relative_error(extend(**args), want) < TIGHT


def test_an_extend_of_last_queries_is_a_decode(batch: MakeBatch, kernels: Any, relative_error: Measure) -> None:
    lens = (5, 33, 16)
    b = batch(lens)
    q_indptr = torch.arange(4, device=b.kv_slots.device).int()
    q_index = b.kv_len - 1
    want = reference.decode(**b.args())
    for module in (reference, kernels):
        assert relative_error(module.extend(**b.args(), q_indptr=q_indptr, q_index=q_index), want) < TIGHT


def test_unmoved_keys_need_no_turning(batch: MakeBatch, kernels: Any) -> None:
    """With every delta 0 the two paths give the same bits, so the host may promise it or not."""
    b = batch(LENS, deltas="zero")
    for decode in (reference.decode, kernels.decode):
        assert torch.equal(decode(**b.args()), decode(**b.but(kv_delta=None).args()))


def test_a_promise_of_no_deltas_is_believed(batch: MakeBatch, kernels: Any, relative_error: Measure) -> None:
    b = batch(LENS, deltas="none")
    assert b.kv_delta is None
    assert relative_error(kernels.decode(**b.args()), reference.decode(**b.args())) < TIGHT


def test_strided_views_as_the_engine_passes_them(
    batch: MakeBatch, kernels: Any, relative_error: Measure, device: str
) -> None:
    """q_pe is a slice of q, q_latent comes out of a batched product head by head, the pool is one layer of all."""
    b = batch(LENS)
    q_pe = torch.cat([torch.full_like(b.q_latent, torch.nan), b.q_pe], dim=-1)[..., b.q_latent.shape[-1] :]
    q_latent = b.q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    c_kv, k_pe = torch.stack([b.c_kv * 0 - 9, b.c_kv])[1], torch.stack([b.k_pe * 0 - 9, b.k_pe])[1]
    views = b.but(q_pe=q_pe, q_latent=q_latent, c_kv=c_kv, k_pe=k_pe)
    assert not q_pe.is_contiguous()
    assert not q_latent.is_contiguous()
    want = reference.decode(**b.args())
    assert relative_error(kernels.decode(**views.args()), want) < TIGHT
    assert relative_error(reference.decode(**views.args()), want) < TIGHT


def test_bad_arguments_are_named(batch: MakeBatch, kernels: Any) -> None:
    b = batch((4,))
    for decode in (reference.decode, kernels.decode):
        with pytest.raises(ValueError, match="unknown rotary layout 'spiral'"):
            decode(**b.but(layout="spiral").args())
    with pytest.raises(ValueError, match="q_pe: the last axis has stride 2"):
        kernels.decode(**b.but(q_pe=torch.cat([b.q_pe, b.q_pe], -1)[..., ::2]).args())


def test_no_queries_no_work(batch: MakeBatch, kernels: Any, device: str) -> None:
    b = batch((4,), num_queries=0)
    none = {"q_indptr": torch.zeros(2, device=device).int(), "q_index": torch.zeros(0, device=device).int()}
    for extend in (reference.extend, kernels.extend):
        assert extend(**b.args(), **none).shape == b.q_latent.shape


def test_the_package_dispatches_by_device(batch: MakeBatch, device: str) -> None:
    b = batch(LENS)
    got, want = leyline_kernels.decode(**b.args()), reference.decode(**b.args())
    if device == "cpu":
        assert torch.equal(got, want)
    else:
        assert not torch.equal(got, want)
        assert torch.allclose(got, want, atol=1e-5)
