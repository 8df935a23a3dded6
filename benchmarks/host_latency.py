"""What the host costs beside the model: edits, prefix matching and book-keeping, and whole calls.

Nothing here runs a forward pass. Sessions get their rows through the engine's own books (slots allocated, contexts
noted), over a pool whose rows are one number wide, so that what is timed is the host's work and not the tensors'.

    python -m benchmarks.host_latency books   the engine's operations, called directly
    python -m benchmarks.host_latency grpc    whole calls on loopback, up to the first forward pass
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

import leyline_server.engine.local as local
import leyline_server.server as wiring
from leyline_server.cache.pool import Pool
from leyline_server.config import ServerConfig
from leyline_server.engine.engine import RowEdit
from leyline_server.engine.local import LocalEngine
from leyline_server.server import Parts, build

TENANT = ("default", "digest")
SMALL, H200 = 300_000, 2_700_000  # slots: a small card's, and those of an H200 beside DeepSeek-V2-Lite
CASES = ((SMALL, 32_768, 1), (H200, 32_768, 1), (H200, 131_072, 1), (H200, 32_768, 64), (H200, 131_072, 64))
OTHERS = 32_768  # tokens in each of the other sessions
CUT, ADDED = 1024, 64
VOCAB = 1280
LONGEST = 262_144  # tokens in one session


def narrow_pool(
    num_layers: int, num_slots: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: Any, device: torch.device
) -> Pool:
    """One number a slot: its books are the real ones."""
    return Pool(1, num_slots, 1, 1, torch.float32, device)


def parts_of(num_slots: int) -> Parts:
    """The server with the embedded model and a pool of `num_slots`; its sessions may be as long as the pool allows."""
    load = wiring.load

    def load_long(*args: Any) -> Any:
        model = load(*args)
        model.config.max_position_embeddings = num_slots
        return model

    with mock.patch.object(local, "Pool", narrow_pool), mock.patch.object(wiring, "load", load_long):
        return build(
            ServerConfig(port=0, slots=num_slots, max_context=LONGEST, threads=1, dtype="float32", device="cpu")
        )


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(32, VOCAB, count).tolist()
    return ids


def fill(engine: LocalEngine, sequence: int) -> None:
    """Gives all pending entries slots, as a step that computed them would."""
    state, cache = engine.sequences[sequence], engine.cache
    index = state.rows.pending
    state.rows = state.rows.filled(index, cache.allocate(index.astype(np.int32)))
    state.rows.note_contexts(cache.table, index)
    upto = state.rows.exact_upto(cache.table)
    cache.tree.insert(state.namespace, state.rows.ids[:upto], state.rows.slots[:upto], cache.tick())


def add(engine: LocalEngine, length: int, seed: int) -> int:
    sequence = engine.open(TENANT)
    engine.append(sequence, random_ids(length, seed))
    fill(engine, sequence)
    return sequence


def timed(call: Callable[[], Any], after: Callable[[], Any] = lambda: None, repeats: int = 51) -> float:
    """Median milliseconds of `call`; `after` puts things back and is not timed."""
    took = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
        after()
    return statistics.median(took) * 1e3


def books(profile: bool) -> None:
    print("| pool | tokens | sessions | operation | ms |\n| --- | --- | --- | --- | --- |", flush=True)
    for num_slots, length, num_sessions in CASES:
        engine = parts_of(num_slots).engine
        main = add(engine, length, 0)
        for seed in range(1, num_sessions):
            add(engine, OTHERS, seed)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        for name, took in _operations(engine, main).items():
            print(f"| {num_slots} | {length} | {num_sessions} | {name} | {took:.3f} |", flush=True)
        if profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        engine.check_integrity()


def _operations(engine: LocalEngine, main: int) -> dict[str, float]:
    cache, edit_ids = engine.cache, iter(range(1_000_000))
    at, length = engine.length(main) // 2, engine.length(main)
    out: dict[str, float] = {}

    def edit(forget: bool, start: int) -> Callable[[], Any]:
        def run() -> None:
            engine.splice(main, [RowEdit(start, start + CUT, (7, 8, 9), f"e{next(edit_ids)}", forget)])

        return run

    def undo() -> None:
        (edit_id,) = (key[1] for key in cache.kept.keys(main))
        engine.undo(main, edit_id, at, 3)

    def put_back() -> None:
        """The list after a FORGET, as long as before and computed."""
        engine.append(main, random_ids(length - engine.length(main), next(edit_ids)))
        fill(engine, main)

    out["splice AMORTIZE"] = timed(edit(False, at), undo)
    edit(False, at)()
    out["undo"] = timed(undo, edit(False, at))
    undo()
    out["splice dry run"] = timed(lambda: engine.splice(main, [RowEdit(at, at + CUT, (7,), "dry")], True))
    out["append 64"] = timed(
        lambda: engine.append(main, range(100, 100 + ADDED)), lambda: engine.truncate(main, length)
    )
    out["checkpoint, discard"] = timed(lambda: engine.discard(engine.checkpoint(main)))
    out["exact_upto"] = timed(lambda: engine.exact_upto(main))
    out["num_pending"] = timed(lambda: engine.num_pending(main))
    out["stats"] = timed(engine.stats)
    out["fork, close"] = timed(lambda: engine.close(engine.fork(main)))
    state = engine.sequences[main]
    out["tree match"] = timed(lambda: cache.tree.match(TENANT, state.rows.ids, cache.tick()))
    out["publish again"] = timed(lambda: cache.tree.insert(TENANT, state.rows.ids, state.rows.slots, cache.tick()))
    out["splice FORGET, near the end"] = timed(edit(True, length - 3 * CUT), put_back)
    out["splice FORGET, in the middle"] = timed(edit(True, at), put_back)
    out["evict 64 from the tree"] = _eviction(engine)
    return out


def _eviction(engine: LocalEngine) -> float:
    """Slots for 64 new rows in a full pool, where what caches alone hold has to give way."""
    cache = engine.cache
    one = engine.open(TENANT)
    engine.append(one, random_ids(min(64 * 51 * 2, cache.table.num_free), 77))
    fill(engine, one)
    engine.close(one)
    rest = engine.open(TENANT)
    if cache.table.num_free:
        engine.append(rest, random_ids(cache.table.num_free, 78))
        state = engine.sequences[rest]
        index = state.rows.pending
        state.rows = state.rows.filled(index, cache.allocate(index.astype(np.int32)))
    positions, taken = np.arange(ADDED, dtype=np.int32), []
    took = timed(lambda: taken.append(cache.allocate(positions)))
    for slots in taken:
        cache.release(slots)
    engine.close(rest)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("books", "grpc"))
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.section == "books":
        books(args.profile)
    else:
        from benchmarks.host_grpc import calls

        calls(args.profile)


if __name__ == "__main__":
    main()
