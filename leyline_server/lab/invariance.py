"""Measure: how much of a cached row is its token's, wherever it was computed.

The same text is computed behind several contexts. Of two rows of it, one from either place, it is guessed by the cosine
of their angle whether they are the same entry of the text, or entries of different tokens. The guess is as good as the
area under its ROC curve: 1 is certain, 0.5 is chance. For each entry and two places there is one pair of either kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_kernels.reference import turn
from leyline_server.lab.figures import Figure
from leyline_server.lab.laboratory import Lab, LabError
from leyline_server.lab.roc import grouped_auc

BENCH: Final = "invariance"
ARMS: Final = ("c_kv", "k_pe as stored", "k_pe turned to the same position")

Cosines = NDArray[np.float64]


def invariance(
    lab: Lab, texts: Sequence[Sequence[int]], contexts: Sequence[Sequence[int]], seed: int = 0
) -> list[Figure]:
    """A figure of all layers' pairs together and one of each layer, for each arm; intervals are over texts.

    A bench of its own: closes what is open on the lab. Raises ValueError when there are not two contexts, or a text has
    not two different tokens; LabError when the pool is too small.
    """
    if len(contexts) < 2:
        raise ValueError(f"{len(contexts)} contexts: a text has to stand at two places at least")
    if not texts or any(len(set(text)) < 2 for text in texts):
        raise ValueError("a text needs two different tokens at least")
    generator = np.random.default_rng(seed)
    same: dict[str, list[Cosines]] = {arm: [] for arm in ARMS}  # of each text: [L, pairs]
    other: dict[str, list[Cosines]] = {arm: [] for arm in ARMS}
    with lab.bench():
        for text in texts:
            # [L, n, width] of each arm, at each place
            places = _places(lab, text, contexts)
            found = [_cosines(one, two, _others(text, generator)) for one, two in combinations(places, 2)]
            for arm in ARMS:
                same[arm].append(np.concatenate([pairs[arm][0] for pairs in found], 1))
                other[arm].append(np.concatenate([pairs[arm][1] for pairs in found], 1))
    figures = []
    num_layers = lab.model.config.num_hidden_layers
    for arm in ARMS:
        for layers in (range(num_layers), *([layer] for layer in range(num_layers))):
            case = "all layers" if isinstance(layers, range) else f"layer {layers[0]}"
            groups = [(a[layers].ravel(), b[layers].ravel()) for a, b in zip(same[arm], other[arm], strict=True)]
            area, low, high = grouped_auc(groups, seed)
            num_pairs = sum(len(part) for group in groups for part in group)
            figures.append(Figure(BENCH, case, arm, "AUC", area, "", num_pairs, low, high))
    return figures


def _places(lab: Lab, text: Sequence[int], contexts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
    """The text's rows of each arm behind each context: [L, n, width] fp32 on the CPU."""
    rotary, pool = lab.model.rotary, lab.engine.cache.pool
    layout = lab.layout
    sequences = [lab.open([*context, *text]) for context in contexts]
    lab.prefill(*sequences)
    out = []
    for sequence, context in zip(sequences, contexts, strict=True):
        slots = lab.engine.sequences[sequence].rows.slots[len(context) :]
        if (slots < 0).any():
            raise LabError("the pool does not hold a text behind all contexts at once")
        index = lab.on_device(slots)
        c_kv, k_pe = (part[:, index].float().cpu() for part in (pool.c_kv, pool.k_pe))
        back = -torch.arange(len(context), len(context) + len(text))
        turned = turn(k_pe.double(), back, rotary.inv_freq.cpu(), layout).float()
        out.append(dict(zip(ARMS, (c_kv, k_pe, turned), strict=True)))
    for sequence in sequences:
        lab.close(sequence)
    return out


def _others(text: Sequence[int], generator: np.random.Generator) -> NDArray[np.int64]:
    """For each entry another one whose token is different."""
    ids = np.asarray(text)
    chosen = generator.integers(len(ids), size=len(ids))
    while (same := ids[chosen] == ids).any():
        chosen[same] = generator.integers(len(ids), size=int(same.sum()))
    return chosen


def _cosines(
    one: dict[str, Tensor], two: dict[str, Tensor], others: NDArray[np.int64]
) -> dict[str, tuple[Cosines, Cosines]]:
    """Of each arm: the cosines [L, n] of the same entry at two places, and of different tokens."""
    index = torch.from_numpy(others)
    return {arm: (_cosine(one[arm], two[arm]), _cosine(one[arm], two[arm][:, index])) for arm in ARMS}


def _cosine(a: Tensor, b: Tensor) -> Cosines:
    cosine: Cosines = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).numpy()
    return cosine
