"""Prefill: a long text nobody has seen, through the engine in chunks, beside Hugging Face's own unpatched forward."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks import agreement, drive
from benchmarks.bench import Bench, require
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed, rival
from benchmarks.timing import sync
from leyline_server.model.attention import cache_argument

REPEATS = 5
GOAL_S = 0.75
DEFAULT, SMALL = "32k, default", "32k, passes of 2,048 rows"


def _chunk(bed: Bed, case: str) -> int | None:
    """The setting prefill_chunk: None leaves it to the server, which takes more when nobody else computes."""
    return None if case == DEFAULT else bed.size(2048, 16)


def cases(bed: Bed) -> Sequence[str]:
    return [DEFAULT, SMALL]


def _tokens(bed: Bed) -> int:
    return bed.size(32_768, 256)


def check(bed: Bed) -> None:
    """What the engine says, and that a prefill computes each of its tokens: else something was found in a cache."""
    agreement.check(bed)
    chunk = _chunk(bed, DEFAULT)
    engine = bed.parts(prefill_chunk=chunk).engine
    before = engine.stats().rows_computed
    watch = _once(bed, chunk, seed=90)
    computed = engine.stats().rows_computed - before
    require(computed == _tokens(bed), f"a prefill of {_tokens(bed)} tokens computed {computed} rows")
    require(watch.report is not None and watch.report.prefix_hit == 0, "a prefill found something in the cache")


def _once(bed: Bed, chunk: int | None, seed: int) -> drive.Watch:
    engine = bed.parts(prefill_chunk=chunk).engine
    sequence = drive.open_with(engine, bed.ids(_tokens(bed), seed))
    watch = drive.generate(engine, sequence, 1)
    drive.run(engine, watch)
    engine.close(sequence)
    return watch


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    chunk = _chunk(bed, case)
    watches = [_once(bed, chunk, seed=100 + seed) for seed in range(REPEATS + 1)][1:]
    yield measured(case, "leyline", "first token", [w.ttft for w in watches], "s").at_most(GOAL_S, bed.full)
    yield measured(case, "leyline", "speed", [_tokens(bed) / w.ttft for w in watches], "tokens/s")
    if case == DEFAULT:
        bed.drop()  # so that the rival has the memory too
        with rival(bed) as model:
            times = _hf_times(bed, model)
        if times:
            yield measured(case, "Hugging Face, sdpa", "first token", times, "s")
        else:
            yield Measured(case, "Hugging Face, sdpa: out of memory", "first token", None, "s")


@torch.inference_mode()
def _hf_times(bed: Bed, model: Any) -> list[float]:
    """Empty when it does not fit into the device's memory."""
    times = []
    model.set_attn_implementation("sdpa")
    for seed in range(REPEATS + 1):
        ids = torch.tensor([bed.ids(_tokens(bed), 100 + seed)], device=bed.device)
        sync(bed.device)
        begun = time.perf_counter()
        try:
            model(input_ids=ids, logits_to_keep=1, use_cache=True, **{cache_argument(model): None})
        except torch.cuda.OutOfMemoryError:
            return []
        sync(bed.device)
        times.append(time.perf_counter() - begun)
    return times[1:]


BENCH = Bench("prefill", "cpu", check, cases, rows)
