"""Fingerprints: runs of ids in a text that its own content picks out, by which equal content is found wherever it is.

Owns the hash and the choice; pure integers. Every run of GRAM ids has a Gear hash (a sum of random numbers, one an id,
shifted by how far back the id stands; Xia et al., FAST 2014), and every run that has the smallest hash of some WINDOW
neighbours is a fingerprint (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD 2003). Two texts that have SHORTEST or more
ids in common, wherever, therefore have a fingerprint in common. One run in nine is one.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

GRAM: Final = 16
WINDOW: Final = 17
SHORTEST: Final = GRAM + WINDOW - 1

_KEY: Final = int.from_bytes(os.urandom(16))  # a constant of the process: texts can't be made to collide


def fingerprints(ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Where each fingerprint's run begins, ascending, and its hash. ids [n]; none where n < SHORTEST."""
    if len(ids) < SHORTEST:
        return np.zeros(0, np.int64), np.zeros(0, np.uint64)
    hashes = gear(ids)
    least = _sliding(np.minimum, hashes)
    # A hash is the least of some window if it is the greatest of the leasts of those that it stands in.
    edge = np.zeros(WINDOW - 1, np.uint64)
    chosen = hashes == _sliding(np.maximum, np.concatenate([edge, least, edge]))
    chosen[1:] &= hashes[1:] != hashes[:-1]  # of a row of the same one is enough
    at = np.flatnonzero(chosen)
    return at, hashes[at]


def gear(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The hash of ids[i : i + GRAM] for each i: [n - GRAM + 1]. What is summed doubles until it is GRAM ids long."""
    hashes = numbers(_rounded(int(ids.max()) + 1))[ids.astype(np.intp)]
    width = 1
    while width < GRAM:
        hashes = hashes[width:] + (hashes[:-width] << np.uint64(width))
        width *= 2
    return hashes


def _sliding(least: Any, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """np.minimum or np.maximum of each WINDOW neighbours: [n - WINDOW + 1]."""
    width = 1
    while 2 * width <= WINDOW:
        values = least(values[:-width], values[width:])
        width *= 2
    rest = WINDOW - width
    return least(values[: len(values) - rest], values[rest:])


def _rounded(count: int) -> int:
    return max(1 << 17, 1 << (count - 1).bit_length())


@cache
def numbers(count: int) -> NDArray[np.uint64]:
    """The secret number of each id below `count`: the same for every count."""
    return np.random.Philox(key=_KEY).random_raw(count)
