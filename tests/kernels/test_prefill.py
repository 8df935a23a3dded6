"""`gather` and `prefill`: the twins against softmax attention in float64 over turned keys, Triton against the twins.

fp32 through the interpreter on a CPU, compiled where there is a GPU; bf16 in test_prefill_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import leyline_kernels
from leyline_kernels import reference

TIGHT = 5e-6
"""What fp32 sums in another order differ by, relative."""

LENS = (53, 37, 0, 20, 9)
COUNTS = (18, 9, 0, 20, 0)
"""Gaps, gaps, an empty sequence, every index, a sequence nobody asks."""

Measure = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Pool:
    """A list over a pool whose other rows are NaN, and the projection that expands it."""

    c_kv: Tensor
    k_pe: Tensor
    kv_slots: Tensor
    kv_delta: Tensor
    inv_freq: Tensor
    kv_b_proj: Tensor

    def gathered(self, module: Any, layout: str, kv_slots: Tensor | None = None) -> tuple[Tensor, Tensor]:
        slots = self.kv_slots if kv_slots is None else kv_slots
        latent, keys = module.gather(self.c_kv, self.k_pe, slots, self.kv_delta, self.inv_freq, layout)
        return latent, keys


@pytest.fixture
def pool(inv_freq: Callable[[int], Tensor], device: str) -> Callable[..., Pool]:
    def make(total: int, heads: int = 2, nope: int = 16, rope: int = 16, v: int = 20, rank: int = 40) -> Pool:
        num_slots = total + 7
        slots = torch.randperm(num_slots - 2, device=device)[:total] + 1
        c_kv = torch.full((num_slots, rank), torch.nan, device=device)
        k_pe = torch.full((num_slots, rope), torch.nan, device=device)
        c_kv[slots] = torch.randn(total, rank, device=device)
        k_pe[slots] = torch.randn(total, rope, device=device)
        moved = torch.arange(total, device=device) >= 16
        return Pool(
            c_kv=c_kv,
            k_pe=k_pe,
            kv_slots=slots.int(),
            kv_delta=(moved * torch.randint(-700, 700, (total,), device=device)).int(),
            inv_freq=inv_freq(rope),
            kv_b_proj=torch.randn(heads * (nope + v), rank, device=device) * rank**-0.5,
        )

    return make


def queries(lens: tuple[int, ...], counts: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q_indptr, q_index: `counts` queries a sequence, ascending, at a random subset of its indices; kv_indptr."""
    index = [torch.randperm(n, device=device)[:c].sort().values for n, c in zip(lens, counts, strict=True)]
    q_indptr, kv_indptr = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (counts, lens))
    return q_indptr, torch.cat(index).int(), kv_indptr


def arguments(
    lens: tuple[int, ...],
    counts: tuple[int, ...],
    device: str,
    heads: int = 2,
    nope: int = 16,
    rope: int = 16,
    v: int = 20,
) -> dict[str, Any]:
    """Arguments of `prefill`, scores of unit deviation."""
    q_indptr, q_index, kv_indptr = queries(lens, counts, device)
    return {
        "q": torch.randn(sum(counts), heads, nope + rope, device=device),
        "kv": torch.randn(sum(lens), heads, nope + v, device=device),
        "keys": torch.randn(sum(lens), rope, device=device),
        "q_indptr": q_indptr,
        "q_index": q_index,
        "kv_indptr": kv_indptr,
        "scale": (nope + rope) ** -0.5,
        "nope": nope,
    }


@pytest.fixture
def kernels(on_triton: None) -> Any:
    from leyline_kernels.gpu.gather import gather
    from leyline_kernels.gpu.prefill import prefill

    class Kernels:
        pass

    both = Kernels()
    both.gather, both.prefill = gather, prefill
    return both


def small_tiles(block_m: int = 32, block_n: int = 16, head_group: int = 0) -> Any:
    from leyline_kernels.gpu.prefill import Tiles

    return Tiles(block_m=block_m, block_n=block_n, num_warps=4, num_stages=1, head_group=head_group)


def turned(k_pe: Tensor, delta: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """Pairs as complex numbers times e^(i delta inv_freq), in float64."""
    k = k_pe.double()
    pairs = k.unflatten(-1, (-1, 2)) if layout == "interleaved" else k.unflatten(-1, (2, -1)).mT
    angle = delta.double()[:, None] * inv_freq.double()
    product = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(product)
    return (pairs if layout == "interleaved" else pairs.mT).flatten(-2)


def attention(q: Tensor, kv: Tensor, keys: Tensor, index: Tensor, scale: float, nope: int) -> Tensor:
    """Softmax attention of one sequence, query by query and head by head, in float64."""
    out = torch.empty(*q.shape[:2], kv.shape[-1] - nope, dtype=torch.float64, device=q.device)
    for t, i in enumerate(index.tolist()):
        for h in range(q.shape[1]):
            seen = kv[: i + 1, h].double()
            key = torch.cat([seen[:, :nope], keys[: i + 1].double()], dim=-1)
            out[t, h] = (key @ q[t, h].double() * scale).softmax(0) @ seen[:, nope:]
    return out


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_the_twins_are_attention_over_turned_keys(
    layout: str, pool: Callable[..., Pool], relative_error: Measure, device: str
) -> None:
    p = pool(sum(LENS))
    args = arguments(LENS, COUNTS, device)
    latent, keys = p.gathered(reference, layout)
    args |= {"kv": (latent @ p.kv_b_proj.T).view(-1, 2, 36), "keys": keys}

    rows = p.kv_slots.long()
    true_keys = turned(p.k_pe[rows], p.kv_delta, p.inv_freq, layout)
    expanded = (p.c_kv[rows].double() @ p.kv_b_proj.double().T).view(-1, 2, 36)
    want = []
    bounds = zip(pairwise(args["q_indptr"].tolist()), pairwise(args["kv_indptr"].tolist()), strict=True)
    for (start, end), (kv_start, kv_end) in bounds:
        of_seq = (args["q"][start:end], expanded[kv_start:kv_end], true_keys[kv_start:kv_end])
        want.append(attention(*of_seq, args["q_index"][start:end], args["scale"], args["nope"]))
    assert relative_error(reference.prefill(**args), torch.cat(want)) < 2e-5
    unturned = args | {"keys": p.k_pe[rows]}
    assert relative_error(reference.prefill(**unturned), torch.cat(want)) > 0.05, "rotation off"


def test_the_expanded_form_is_the_absorbed_form(
    pool: Callable[..., Pool], relative_error: Measure, device: str
) -> None:
    p = pool(sum(LENS))
    args = arguments(LENS, COUNTS, device)
    latent, keys = p.gathered(reference, "interleaved")
    args |= {"kv": (latent @ p.kv_b_proj.T).view(-1, 2, 36), "keys": keys}
    w_uk, w_uv = p.kv_b_proj.view(2, 36, -1).split([16, 20], dim=1)
    out_latent = reference.extend(
        torch.einsum("thd,hdr->thr", args["q"][..., :16], w_uk),
        args["q"][..., 16:],
        args["q_indptr"],
        args["q_index"],
        p.c_kv,
        p.k_pe,
        args["kv_indptr"][:-1],
        args["kv_indptr"].diff(),
        p.kv_slots,
        p.kv_delta,
        p.inv_freq,
        "interleaved",
        args["scale"],
    )
    absorbed = torch.einsum("thr,hvr->thv", out_latent, w_uv)
    assert relative_error(reference.prefill(**args), absorbed) < TIGHT


@pytest.mark.parametrize(("rank", "rope"), [(40, 16), (64, 24)])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_gather_equals_its_twin(
    layout: str, rank: int, rope: int, pool: Callable[..., Pool], kernels: Any, relative_error: Measure
) -> None:
    p = pool(37, rank=rank, rope=rope)
    (latent, keys), (want_latent, want_keys) = p.gathered(kernels, layout), p.gathered(reference, layout)
    assert torch.equal(latent, want_latent)
    assert relative_error(keys, want_keys) < TIGHT
    assert torch.equal(keys[:16], want_keys[:16]), "a block in which nothing moved"
    for module in (kernels, reference):
        _, still = module.gather(p.c_kv, p.k_pe, p.kv_slots, None, p.inv_freq, layout)
        assert torch.equal(still, p.k_pe[p.kv_slots.long()])
    assert relative_error(still, want_keys) > 0.05, "rotation off"


def test_entries_without_kv_are_zero_rows(pool: Callable[..., Pool], kernels: Any) -> None:
    """Row -1 of this pool is NaN: if it is read, it shows."""
    p = pool(37)
    holes = p.kv_slots.clone()
    holes[[3, 20, 36]] = -1
    for module in (kernels, reference):
        latent, keys = p.gathered(module, "interleaved", holes)
        for rows, whole in zip((latent, keys), p.gathered(module, "interleaved"), strict=True):
            assert rows[[3, 20, 36]].eq(0).all()
            assert torch.equal(rows[4:20], whole[4:20])
            assert torch.isfinite(rows).all()


@pytest.mark.parametrize(
    ("heads", "nope", "rope", "v", "num_splits", "tiles"),
    [(3, 16, 16, 20, 1, (32, 16)), (2, 24, 8, 16, 2, (32, 32)), (1, 128, 64, 128, 3, (64, 16)), (1, 8, 16, 40, 1, ())],
)
def test_prefill_equals_its_twin(
    heads: int,
    nope: int,
    rope: int,
    v: int,
    num_splits: int,
    tiles: tuple[int, ...],
    kernels: Any,
    relative_error: Measure,
    device: str,
) -> None:
    args = arguments(LENS, COUNTS, device, heads, nope, rope, v)
    want = reference.prefill(**args)
    got = kernels.prefill(**args, tiles=small_tiles(*tiles) if tiles else None, num_splits=num_splits)
    assert relative_error(got, want) < TIGHT
    shifted = args | {"q_index": (args["q_index"] - 1).clamp(min=0)}
    assert relative_error(reference.prefill(**shifted), want) > 0.05, "the causal mask off by one"


def test_a_sequence_without_entries_gives_zeros(kernels: Any, device: str) -> None:
    args = arguments((5, 0), (2, 0), device)
    args |= {"q": torch.randn(3, 2, 32, device=device), "q_indptr": torch.tensor([0, 2, 3], device=device).int()}
    args["q_index"] = torch.tensor([1, 4, 0], device=device).int()
    for module in (kernels, reference):
        assert module.prefill(**args)[2].eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_nobody_sees_are_never_read(num_splits: int, kernels: Any, relative_error: Measure, device: str) -> None:
    """Behind a sequence's last query anything may stand: pending entries, and the next sequence."""
    args = arguments((40, 37), (12, 9), device)
    args["q_index"] = torch.cat([torch.arange(7, 31, 2), torch.arange(9)]).int().to(device)
    want = reference.prefill(**args)
    args["kv"][30:40], args["kv"][49:] = torch.nan, torch.nan
    args["keys"][30:40], args["keys"][49:] = torch.nan, torch.nan
    assert relative_error(reference.prefill(**args), want) < TIGHT
    assert relative_error(kernels.prefill(**args, tiles=small_tiles(), num_splits=num_splits), want) < TIGHT


def test_chunks_give_what_the_whole_gives(kernels: Any, relative_error: Measure, device: str) -> None:
    args = arguments((50,), (50,), device)
    whole = kernels.prefill(**args, tiles=small_tiles())
    assert relative_error(whole, reference.prefill(**args)) < TIGHT
    for start, end in ((0, 17), (17, 48), (48, 50)):
        chunk = args | {
            "q": args["q"][start:end],
            "q_index": args["q_index"][start:end],
            "q_indptr": torch.tensor([0, end - start], device=device).int(),
            "kv": args["kv"][:end],
            "keys": args["keys"][:end],
            "kv_indptr": torch.tensor([0, end], device=device).int(),
        }
        assert relative_error(kernels.prefill(**chunk, tiles=small_tiles()), whole[start:end]) < TIGHT


def test_strided_views_as_the_engine_passes_them(kernels: Any, relative_error: Measure, device: str) -> None:
    """q lies head by head, kv in a wider product, keys in a wider row."""
    args = arguments((21,), (21,), device)
    want = reference.prefill(**args)
    views = {
        "q": args["q"].transpose(0, 1).contiguous().transpose(0, 1),
        "kv": torch.cat([args["kv"], torch.full_like(args["kv"], torch.nan)], dim=1)[:, :2],
        "keys": torch.cat([args["keys"], torch.full_like(args["keys"], torch.nan)], dim=1)[:, :16],
    }
    assert not any(view.is_contiguous() for view in views.values())
    for module in (kernels, reference):
        assert relative_error(module.prefill(**args | views), want) < TIGHT


def test_heads_in_groups_that_do_not_divide_them(kernels: Any, relative_error: Measure, device: str) -> None:
    args = arguments((21, 9), (21, 3), device, heads=5)
    got = kernels.prefill(**args, tiles=small_tiles(head_group=2))
    assert relative_error(got, reference.prefill(**args)) < TIGHT


def test_heads_launched_together_fit_the_cache_or_fill_the_chip(on_triton: None) -> None:
    from leyline_kernels.gpu.prefill import choose_heads

    a_head = 256 * 2  # bytes an entry, of V2-Lite's shape in bf16

    def heads(blocks: int, entries: int) -> int:
        return choose_heads(16, blocks, entries * a_head, processors=132)

    assert heads(257, 4096) == 16  # the cache holds all
    assert heads(257, 65536) == 2  # it holds one: two fill three rounds
    assert heads(65, 16384) == 8  # it holds four, seven fill three rounds
    assert heads(26, 16384) == 16
    assert heads(27, 16384) == 16, "and none of one head, behind fifteen"
    assert choose_heads(5, 1, 1 << 40, processors=1) == 5


def test_every_block_is_found_once_and_the_heaviest_first(on_triton: None, device: str) -> None:
    import triton
    import triton.language as tl

    from leyline_kernels.gpu.prefill import _find_heaviest

    @triton.jit
    def find(q_indptr, q_index, seqs, rows, FIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SEQS: tl.constexpr):
        place = tl.program_id(0)
        seq, row = FIND(q_indptr, q_index, 5, place, BLOCK_M, BLOCK_SEQS)
        tl.store(seqs + place, seq)
        tl.store(rows + place, row)

    lens, counts = (400, 33, 0, 64, 900), (40, 33, 0, 7, 17)
    q_indptr = torch.tensor([0, *counts], device=device).cumsum(0).int()
    index = [torch.arange(n - c, n) for n, c in zip(lens, counts, strict=True)]
    q_index = torch.cat(index).int().to(device)
    blocks = {(b, s + i) for b, (s, e) in enumerate(pairwise(q_indptr.tolist())) for i in range(0, e - s, 16)}
    num_programs = sum(counts) // 16 + len(lens)
    seqs, rows = torch.zeros(2, num_programs, dtype=torch.int32, device=device)
    find[(num_programs,)](q_indptr, q_index, seqs, rows, FIND=_find_heaviest, BLOCK_M=16, BLOCK_SEQS=8)
    found = [place for place in zip(seqs.tolist(), rows.tolist(), strict=True) if place[0] < 5]
    assert len(found) == len(blocks)
    assert set(found) == blocks
    assert seqs[len(found) :].eq(5).all(), "spare blocks stand at the end"
    weight = [(int(q_index[row]) + 15) // 16 for _, row in found]
    assert all(first >= second - 1 for first, second in pairwise(weight))
    assert found[0][0] == 4


def test_bad_arguments_are_named(pool: Callable[..., Pool], kernels: Any, device: str) -> None:
    args = arguments((4,), (4,), device)
    with pytest.raises(ValueError, match="keys: the last axis has stride 2"):
        kernels.prefill(**args | {"keys": torch.cat([args["keys"], args["keys"]], -1)[:, ::2]})
    for module in (kernels, reference):
        with pytest.raises(ValueError, match="unknown rotary layout 'spiral'"):
            pool(4).gathered(module, "spiral")


def test_no_queries_no_work(pool: Callable[..., Pool], kernels: Any, device: str) -> None:
    args = arguments((4,), (0,), device)
    p = pool(0)
    for module in (kernels, reference):
        assert module.prefill(**args).shape == (0, 2, 20)
        latent, keys = p.gathered(module, "halves")
        assert latent.shape == (0, 40)
        assert keys.shape == (0, 16)


def test_the_package_dispatches_by_device(pool: Callable[..., Pool], relative_error: Measure, device: str) -> None:
    args, p = arguments(LENS, COUNTS, device), pool(21)
    assert torch.equal(leyline_kernels.prefill(**args), reference.prefill(**args)) == (device == "cpu")
    assert relative_error(leyline_kernels.prefill(**args), reference.prefill(**args)) < TIGHT
    for got, want in zip(p.gathered(leyline_kernels, "halves"), p.gathered(reference, "halves"), strict=True):
        assert relative_error(got, want) < TIGHT
