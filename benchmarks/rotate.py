"""Eager rotation: every key of 32k tokens rewritten in all layers, beside a plain copy in the same run.

What an engine does whose attention can't turn keys; Leyline's own turns them as it reads them. Goal: 85 % of the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import leyline_kernels
from benchmarks.bench import Bench, require
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from benchmarks.timing import call_times, copy_bandwidth
from leyline_kernels import reference

TOLERANCE = 0.02  # of the key's norm: bf16 rounds to 0.004, an off-by-one errs by 0.11


def _tokens(bed: Bed) -> int:
    return bed.size(32_768, 512)


IN_ORDER, SCRAMBLED = "rotate, slots in order", "rotate, slots scrambled"
"""A session's slots are mostly in order, as they were allocated; the worst case is no order at all."""


def _inputs(bed: Bed, tokens: int, arm: str = SCRAMBLED) -> dict[str, Any]:
    """Keys, each moved by another distance, into fresh slots."""
    config = bed.shape.config
    generator = torch.Generator().manual_seed(3)
    half = config["qk_rope_head_dim"] // 2
    slots = torch.randperm(2 * tokens, generator=generator).to(torch.int32)
    if arm == IN_ORDER:
        slots = torch.arange(2 * tokens, dtype=torch.int32)
    k_pe = torch.randn(config["num_hidden_layers"], 2 * tokens, 2 * half, generator=generator)
    delta = torch.randint(-tokens, tokens, (tokens,), generator=generator, dtype=torch.int32)
    return {
        "k_pe": k_pe.to(bed.device, bed.dtype),
        "src_slots": slots[:tokens].to(bed.device),
        "dst_slots": slots[tokens:].to(bed.device),
        "delta": delta.to(bed.device),
        "inv_freq": (10_000.0 ** -(torch.arange(half) / half)).to(bed.device),
        "layout": "interleaved",
    }


def error(k_pe: Tensor, given: dict[str, Any]) -> float:
    """Largest relative error of a rotated key in `k_pe`, against the formula in float64 on the keys as given."""
    source, target = given["src_slots"].long(), given["dst_slots"].long()
    worst = 0.0
    for layer in range(k_pe.shape[0]):
        want = reference.turn(given["k_pe"][layer, source].double(), given["delta"], given["inv_freq"], given["layout"])
        off = (k_pe[layer, target].double() - want).norm(dim=-1) / want.norm(dim=-1)
        worst = max(worst, float(off.max()))
    return worst


def check(bed: Bed) -> None:
    given = _inputs(bed, min(_tokens(bed), 4096))
    k_pe = given["k_pe"].clone()
    leyline_kernels.rotate(**{**given, "k_pe": k_pe})
    off = error(k_pe, given)
    require(off < TOLERANCE, f"rotated keys err by {off:.3g}")
    require(error(given["k_pe"], given) > TOLERANCE, "the check passes keys that nobody rotated")


def cases(bed: Bed) -> Sequence[str]:
    return [f"{_tokens(bed):,} tokens x {bed.shape.config['num_hidden_layers']} layers"]


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    copy = measured(case, "copy", "bandwidth", _tera(copy_bandwidth(bed.device, bed.size(1 << 30, 1 << 20))), "TB/s")
    yield copy
    for arm in (IN_ORDER, SCRAMBLED):
        given = _inputs(bed, _tokens(bed), arm)
        k_pe = given["k_pe"]
        size = 2 * len(given["delta"]) * k_pe.shape[0] * k_pe.shape[-1] * k_pe.element_size()  # read and written
        times = call_times(partial(_rotated, given), bed.device)
        yield measured(case, arm, "time", [seconds * 1e6 for seconds in times], "us")
        speed = measured(case, arm, "bandwidth", _tera([size / seconds for seconds in times]), "TB/s")
        yield speed
        assert speed.value is not None
        assert copy.value is not None
        share = Measured(case, arm, "share of copy", 100 * speed.value / copy.value, "%")
        yield share.at_least(85, bed.full and arm == IN_ORDER)


def _rotated(given: dict[str, Any], index: int) -> None:
    """One call, on the same keys each time."""
    leyline_kernels.rotate(**given)


def _tera(samples: Sequence[float]) -> list[float]:
    return [value / 1e12 for value in samples]


BENCH = Bench("rotate", "cpu", check, cases, rows)
