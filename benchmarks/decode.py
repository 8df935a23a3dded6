"""Decoding: MLA attention over one layer against the bandwidth of a copy, and the engine's whole step.

kernel: `leyline_kernels.decode`, keys unturned, moved in pieces as edits leave them, and each moved otherwise.
step: from token to token through the engine, in graphs without turning, in graphs that could turn while nothing is
moved, and with moved rows; Hugging Face's own model eager beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

import leyline_kernels
from benchmarks import agreement, decode_inputs, drive
from benchmarks.bench import Bench, require
from benchmarks.decode_inputs import TURNINGS, DecodeInput
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed, rival
from benchmarks.timing import call_times, copy_bandwidth, sync
from leyline_kernels import reference
from leyline_server.engine.engine import Engine, RowEdit, SequenceId
from leyline_server.engine.local import LocalEngine
from leyline_server.model.attention import cache_argument

TOLERANCE = 0.03  # of the output's norm, in bf16; wrong deltas err by a tenth and more
COLD_BYTES = 512 << 20  # pools to go through before one is read again: ten times a GPU's L2
STEPS, SKIPPED = 64, 8
STEP_GOALS_MS = {"1 x 8k": 4.5, "16 x 8k": 11.0, "16 x 32k": 15.0}
KERNEL_CASES = ("1 x 8k", "1 x 32k", "16 x 8k", "16 x 32k")


def _sizes(bed: Bed, case: str) -> tuple[int, int]:
    """(sequences, tokens in each) of "kernel 16 x 32k"."""
    batch, _, length = case.split()[1:]
    tokens = int(length.removesuffix("k"))
    return (int(batch), tokens * 1024) if bed.shape.full else (min(int(batch), 4), tokens * 8)


def cases(bed: Bed) -> Sequence[str]:
    return [*(f"kernel {case}" for case in KERNEL_CASES), *(f"step {case}" for case in STEP_GOALS_MS)]


def check(bed: Bed) -> None:
    for case in (f"kernel {case}" for case in KERNEL_CASES):
        for turning in TURNINGS:
            check_kernel(decode_inputs.make(bed, *_sizes(bed, case), turning), f"{case}, {turning}")
    agreement.check(bed)


def check_kernel(given: DecodeInput, what: str) -> None:
    """Against the reference in fp32; and the reference with deltas taken away must differ, or nothing was turned."""
    got = leyline_kernels.decode(*given.arguments(0))
    off = relative_error(got, reference.decode(*_wide(given).arguments(0, bound=False)))
    require(off < TOLERANCE, f"{what}: the output errs by {off:.3g}")
    if given.kv_delta is not None:
        blind = relative_error(got, reference.decode(*replace(_wide(given), kv_delta=None).arguments(0, bound=False)))
        require(blind > TOLERANCE, f"{what}: the output is that of unturned keys")


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def _wide(given: DecodeInput) -> DecodeInput:
    return replace(
        given,
        q_latent=given.q_latent.float(),
        q_pe=given.q_pe.float(),
        c_kv=given.c_kv[:1].float(),
        k_pe=given.k_pe[:1].float(),
    )


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    return _kernel_rows(bed, case) if case.startswith("kernel") else _step_rows(bed, case)


# ------------------------------------------------------------ kernel


def _kernel_rows(bed: Bed, case: str) -> Iterable[Measured]:
    batch, length = _sizes(bed, case)
    one = (
        batch * length * bed.dtype.itemsize * (bed.shape.config["kv_lora_rank"] + bed.shape.config["qk_rope_head_dim"])
    )
    layers = min(27, max(1, -(-bed.size(COLD_BYTES, 1 << 20) // one)))
    copies = copy_bandwidth(bed.device, bed.size(1 << 30, 1 << 20))
    copy = measured(case, "copy", "bandwidth", [value / 1e12 for value in copies], "TB/s")
    yield copy
    for turning in TURNINGS:
        given = decode_inputs.make(bed, batch, length, turning, layers)
        times = call_times(_Call(given), bed.device, calls=max(layers, 8))
        yield measured(case, turning, "time", [seconds * 1e6 for seconds in times], "us")
        speed = measured(case, turning, "bandwidth", [given.row_bytes / seconds / 1e12 for seconds in times], "TB/s")
        yield speed
        assert speed.value is not None
        assert copy.value is not None
        share = Measured(case, turning, "share of copy", 100 * speed.value / copy.value, "%")
        # The goal is set for the one case that fills the chip, with keys moved as edits move them.
        yield share.at_least(70, bed.full and case == "kernel 16 x 32k" and turning == "piecewise")


class _Call:
    def __init__(self, given: DecodeInput) -> None:
        self._given, self._layers = given, given.c_kv.shape[0]

    def __call__(self, index: int) -> None:
        leyline_kernels.decode(*self._given.arguments(index % self._layers))


# ------------------------------------------------------------ step


def _step_rows(bed: Bed, case: str) -> Iterable[Measured]:
    batch, length = _sizes(bed, case)
    engine = bed.parts().engine
    sequences = drive.prefill(engine, (bed.ids(length, seed=seed) for seed in range(batch)))
    with without_turning(engine):
        unturned = measured(case, "leyline, unturned", "step", step_ms(engine, sequences), "ms")
    yield unturned
    for sequence in sequences:
        engine.truncate(sequence, length)
    yield measured(case, "leyline, could turn, nothing moved", "step", step_ms(engine, sequences), "ms")
    for seed, sequence in enumerate(sequences):
        engine.truncate(sequence, length)
        move_rows(engine, sequence, bed, seed)
        drive.run(engine, drive.compute(engine, sequence))
    turned = measured(case, "leyline, turned", "step", step_ms(engine, sequences), "ms")
    yield turned.at_most(STEP_GOALS_MS[case.removeprefix("step ")], bed.full)
    drive.close(engine, sequences)
    assert turned.value is not None
    assert unturned.value is not None
    share = 100 * (turned.value - unturned.value) / turned.value
    yield Measured(case, "leyline, turned", "turning's share of the step", share, "%").at_most(2, bed.full)
    if batch == 1:
        with rival(bed) as model:
            yield measured(case, "Hugging Face eager", "step", hf_step_ms(model, bed.ids(length, seed=0)), "ms")


@contextmanager
def without_turning(engine: LocalEngine) -> Iterator[None]:
    """Decode graphs without turning inside the block, of which no list may have a moved row."""
    engine.runner.warm_up(turned=False)
    try:
        yield
    finally:
        engine.runner.warm_up()


def step_ms(engine: Engine, sequences: Sequence[SequenceId]) -> list[float]:
    """Milliseconds from token to token while all of these decode together."""
    watches = [drive.generate(engine, sequence, SKIPPED + STEPS) for sequence in sequences]
    drive.run(engine, *watches)
    together = max(watch.times[0] for watch in watches)
    begun = [time for time in watches[0].times if time >= together]
    gaps = [(later - earlier) * 1e3 for earlier, later in pairwise(begun)]
    return gaps[min(SKIPPED, len(gaps) // 2) :]


def move_rows(engine: Engine, sequence: SequenceId, bed: Bed, seed: int) -> None:
    """Cuts spread over the sequence, and pending ids at its end that make it as long as it was."""
    length = engine.length(sequence)
    rng = np.random.default_rng(seed)
    longest = max(2, length // 128)
    stride = (length - length // 16) // decode_inputs.EDITS
    edits = []
    for number in range(decode_inputs.EDITS):
        start = length // 16 + number * stride
        edits.append(RowEdit(start, start + int(rng.integers(1, longest)), (), f"cut{number}"))
    engine.splice(sequence, edits)
    engine.append(sequence, bed.ids(length - engine.length(sequence), seed=500 + seed))


@torch.inference_mode()
def hf_step_ms(model: Any, ids: Sequence[int], steps: int = 20) -> list[float]:
    """Hugging Face's own forward, one token at a time over its own cache."""
    device, cache = model.device, DynamicCache(config=model.config)
    own = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
    given = torch.tensor([list(ids)], device=device)
    times = []
    for _ in range(steps + 4):
        begun = time.perf_counter()
        logits = model(input_ids=given, **own).logits
        given = logits[:, -1:].argmax(-1)
        sync(device)
        times.append((time.perf_counter() - begun) * 1e3)
    return times[4:]  # without the prefill and the first steps


BENCH = Bench("decode", "cpu", check, cases, rows)
