"""How much of what prompts have in common, above their exact prefix, is found again at another position.

Held against every match of 32 ids and more with any earlier text: nothing that looks for such matches finds more. Five
seeded patterns, and recorded prompts where they are given. No model runs: all texts count as exact and all are
registered, so these are shares of what is there to find. The engine registers only what was computed exactly: the arms
`served` are its own code, each prompt a session of its own. The ways that lost are arms here and nowhere else. Which
fingerprints a text has hangs on a number that each process draws: our shares differ from run to run, by a tenth of a
percent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from benchmarks import content_memory
from benchmarks.bench import Bench, require
from benchmarks.content_arms import MARKED, MARKED_TOO, NAMESPACE, OURS, Prefix, Registry, Tally, count
from benchmarks.content_input import CHANGES, PATTERNS, SETS, Ids, Text, changed, encoded, pattern, recorded, tokenizer
from benchmarks.content_served import ARMS, reused
from benchmarks.content_text import Writer
from benchmarks.record import Measured, measured
from benchmarks.registry import Bed
from leyline_server.cache.chunks import SINK
from leyline_server.cache.fingerprints import fingerprints

GOAL: Final = 97.0
PROMPTS, SEEDS, CHECKED = 16, 3, 4
MARKER: Final = 64
SPEED: Final = "speed at 100k tokens"
LENGTH: Final = 100_000
SHARE, REUSED, SERVED = "found of what is there", "reused of all tokens", "reused by a server, of all tokens"
TOGETHER: Final = "memory: 16 sessions, the same ten documents"
SHUFFLED: Final = "memory: 100 shuffles of 14 documents"


def check(bed: Bed) -> None:
    """On a few prompts of each kind: all that is found is the text's own, and nearly all that is there is found."""
    for case, lists in _inputs(bed, CHECKED, 1, 1).items():
        tally = _tallied(lists())
        require(tally.oracle > 0, f"{case}: there is nothing to find")
        require(tally.share(OURS) >= GOAL, f"{case}: {tally.share(OURS):.1f} % of what is there was found")


def cases(bed: Bed) -> Sequence[str]:
    return [*_inputs(bed), SPEED, TOGETHER, SHUFFLED]


def rows(bed: Bed, case: str) -> Iterable[Measured]:
    told = f"{case}; {tokenizer()[1]}"
    if case == SPEED:
        return _speed(told)
    if case == TOGETHER:
        return content_memory.open_together(told)
    if case == SHUFFLED:
        return (figure for factor in (1.5, 0.5) for figure in content_memory.one_after_another(told, factor))
    lists = list(_inputs(bed)[case]())
    tally = _tallied(lists)
    served = {arm: 100 * reused(lists, reuse) / tally.tokens for arm, reuse in ARMS.items()}
    return [
        *_shares(told, tally),
        *(Measured(told, f"served: {arm}", SERVED, share, "%", tally.texts) for arm, share in served.items()),
    ]


def _inputs(
    bed: Bed, prompts: int = PROMPTS, seeds: int = SEEDS, files: int = 99
) -> dict[str, Callable[[], Iterable[list[Text]]]]:
    """By case, what makes its lists of texts."""

    def generated(name: str) -> Callable[[], Iterable[list[Text]]]:
        return lambda: (pattern(name, prompts, seed) for seed in range(seeds))

    out = {f"pattern: {name}": generated(name) for name in PATTERNS}
    root = bed.traces
    if root is not None and any(root.glob(SETS["magagent"])):
        out["recorded: magagent"] = lambda: recorded(root, "magagent", files)
    if root is not None and any(root.glob(SETS["miniswe"])):
        for change in CHANGES:
            out[f"recorded: miniswe, {change}"] = partial(changed, root, change, files)
    return out


def _tallied(lists: Iterable[list[Text]]) -> Tally:
    tally = Tally()
    for texts in lists:
        count(texts, tally)
    return tally


def _shares(case: str, tally: Tally) -> Iterator[Measured]:
    def share(arm: str, ids: int) -> Measured:
        return Measured(case, arm, REUSED, 100 * ids / tally.tokens, "%", tally.texts)

    yield Measured(case, "exact prefix", "tokens", tally.tokens, "tokens", tally.texts)
    yield share("exact prefix", tally.prefix)
    yield share("all that is there", tally.prefix + tally.oracle)
    for arm, found in tally.found.items():
        if arm in (MARKED, MARKED_TOO) and not tally.edges:
            continue  # nobody knows what to mark
        figure = Measured(case, arm, SHARE, tally.share(arm), "%", tally.texts)
        yield figure.at_least(GOAL) if arm == OURS else figure
        yield share(arm, tally.prefix + found)
        if arm == MARKED:
            yield Measured(case, arm, "ids of markers", 100 * MARKER * tally.edges / tally.tokens, "%", tally.texts)
    for metric, seconds in (("match, of 1k tokens", tally.finding), ("register, of 1k tokens", tally.adding)):
        yield Measured(case, OURS, metric, 1e9 * seconds[OURS] / tally.tokens, "us", tally.texts)


def _speed(case: str) -> Iterator[Measured]:
    """On one core: none of this has threads. What is looked for or registered is a text of 100k ids, where another is
    registered already."""
    documents = _documents(21)
    known = np.concatenate(documents)
    shuffled = [documents[one] for one in np.random.default_rng(21).permutation(len(documents))]
    texts = {
        "known in one piece": np.concatenate([encoded(Writer(23).header(60)), known]),
        f"known in {len(documents)} documents": np.concatenate(shuffled),
        "not known": np.concatenate(_documents(22)),
    }
    yield measured(case, "fingerprints", "100k tokens", _times(lambda: fingerprints(known[:LENGTH])), "ms").at_most(5)
    for arm, text in texts.items():
        ids = text[:LENGTH]

        def with_known() -> Registry:
            registry = Registry(3 * LENGTH)
            registry.add(Text(known[:LENGTH]), Prefix(0, 0))
            return registry

        registry = with_known()
        times = _times(partial(registry.chunks.match, NAMESPACE, ids[SINK:]))
        yield measured(case, f"leyline: {arm}", "match, of 100k tokens", times, "ms")
        times = []
        for _ in range(7):
            registry = with_known()
            slots = registry.table.allocate(np.arange(len(ids), dtype=np.int32))
            begun = time.perf_counter()
            registry.chunks.register(NAMESPACE, ids, slots, 0, 2)
            times.append(1e3 * (time.perf_counter() - begun))
        yield measured(case, f"leyline: {arm}", "register, of 100k tokens", times, "ms")


def _documents(seed: int) -> list[Ids]:
    """Of 100k ids together, or a few more."""
    write, out = Writer(seed), list[Ids]()
    while sum(map(len, out)) < LENGTH:
        out.append(encoded(write.document()))
    return out


def _times(call: Callable[[], object], n: int = 20) -> list[float]:
    """Milliseconds of each call, the first two left out."""
    out = []
    for _ in range(n + 2):
        begun = time.perf_counter()
        call()
        out.append(1e3 * (time.perf_counter() - begun))
    return out[2:]


BENCH = Bench("content_recovery", "cpu", check, cases, rows, about="no model", host=True)
