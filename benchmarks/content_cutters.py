"""Where texts are cut, by the ways that lost: the paper's threshold on a rolling hash, and the least hash nearby.

Pure integers. A cut is where a chunk begins; all return [0, .., n], ascending. The rolling hash is Gear's over 64 ids
(Xia et al., FAST 2014).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Hashes = NDArray[np.uint64]
WINDOW: Final = 64
EXPECTED: Final = 128
LEAST: Final = 32
MOST: Final = 512
NEAR: Final = 24
_NUMBERS: Final = np.random.default_rng(7).integers(0, 1 << 64, 1 << 18, np.uint64)
_BASE: Final = 0x9E3779B97F4A7C15


def blocks(ids: Ids) -> list[int]:
    """Every 128 ids."""
    return [*range(0, len(ids), EXPECTED), len(ids)]


def threshold(ids: Ids) -> list[int]:
    """After each id at which the hash is small, 32 to 512 apart: each cut hangs on the one before it."""
    out = [0]
    for cut in [*(np.flatnonzero(gear(ids) < np.uint64((1 << 64) // EXPECTED)) + 1).tolist(), len(ids)]:
        while cut - out[-1] > MOST:
            out.append(out[-1] + MOST)
        if cut - out[-1] >= LEAST:
            out.append(cut)
    return out if out[-1] == len(ids) else [*out, len(ids)]


def local_minimum(ids: Ids) -> list[int]:
    """After each id whose hash is the least of the 24 before it, itself and the 24 after it, where the cut before it is
    32 or more away. What is longer than 512 is cut up, and no other cut moves for it."""
    return _filled(least_nearby(ids).tolist(), len(ids))


def least_nearby(ids: Ids) -> NDArray[np.int64]:
    """The cuts that the content makes. Of equal ones the first is the least."""
    hashes = gear(ids)
    edge = np.full(NEAR, np.uint64(2**64 - 1))
    padded = np.concatenate([edge, hashes, edge])
    least, width = padded, 1
    while 2 * width <= NEAR:
        least = np.minimum(least[:-width], least[width:])
        width *= 2
    least = np.minimum(least[: len(padded) - NEAR + 1], least[NEAR - width : len(padded) - width + 1])
    return np.flatnonzero((hashes < least[: len(ids)]) & (hashes <= least[NEAR + 1 : NEAR + 1 + len(ids)])) + 1


def _filled(cuts: Iterable[int], end: int) -> list[int]:
    out = [0]
    for cut in cuts:
        if cut - out[-1] >= LEAST:
            out += [*range(out[-1] + MOST, cut - LEAST + 1, MOST), cut]
    out += range(out[-1] + MOST, end, MOST)
    return out if out[-1] == end else [*out, end]


def gear(ids: Ids) -> Hashes:
    """The hash of the 64 ids up to each one: [n]."""
    hashes, width = _NUMBERS[ids], 1
    while width < min(WINDOW, len(ids)):
        hashes[width:] += hashes[:-width] << np.uint64(width)
        width *= 2
    return hashes


def windows(ids: Ids, width: int) -> Hashes:
    """A hash of each `width` ids in a row: [n - width + 1]; `width` is a power of two."""
    if len(ids) < width:
        return np.zeros(0, np.uint64)
    hashes, done = _NUMBERS[ids], 1
    while done < width:
        hashes = hashes[:-done] * np.uint64(pow(_BASE, done, 1 << 64)) + hashes[done:]
        done *= 2
    return hashes
