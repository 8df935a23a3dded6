"""Endless batches of training rows for a data loader's workers, ordinary ones and edited ones in a given share."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from training.edited_rows import NEVER, EditedRow, make_edited_row, num_extras
from training.render import IGNORED, PAD
from training.rows import Shape, make_row
from training.tasks import KINDS


class Edits(NamedTuple):
    """What the tokens of edited rows see: T keys of their own and E extra ones. Compact: the device makes the mask.

    positions: [B, T] int64. sources: [B, E] int64, deltas: [B, E] int64. first, until: [B, T + E] int16, key k is
    visible to the queries t with first <= t < until; padding to none.
    """

    positions: Tensor
    sources: Tensor
    deltas: Tensor
    first: Tensor
    until: Tensor


class Batch(NamedTuple):
    """ids, targets: [B, T] int64; classes: [B, T] uint8, the targets' loss classes."""

    ids: Tensor
    targets: Tensor
    classes: Tensor
    edits: Edits | None = None


def ordinary_batch(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """The rows of `make_row`, each token's target the one after it."""
    ids, classes = (np.array(part) for part in zip(*rows, strict=True))
    targets, target_classes = np.full_like(ids, PAD), np.full_like(classes, IGNORED)
    targets[:, :-1], target_classes[:, :-1] = ids[:, 1:], classes[:, 1:]
    return Batch(torch.from_numpy(ids), torch.from_numpy(targets), torch.from_numpy(target_classes.astype(np.uint8)))


def edited_batch(rows: Sequence[EditedRow], shape: Shape) -> Batch:
    """Edited rows, cut to the shape's length: what comes later is no part of what is seen before."""
    length, room = shape.length, num_extras(shape)
    extras = np.zeros((len(rows), 4, room), dtype=np.int64)
    for row, padded in zip(rows, extras, strict=True):
        seen = [(e.source, e.delta, e.first, e.until) for e in row.extras if e.first < length]
        padded[:, : len(seen)] = np.array(seen, dtype=np.int64).reshape(-1, 4).T
    own_first = np.broadcast_to(np.arange(length), (len(rows), length))

    def column(name: str) -> NDArray[np.int64]:
        return np.array([getattr(row, name)[:length] for row in rows])

    edits = Edits(
        torch.from_numpy(column("positions")),
        torch.from_numpy(extras[:, 0].copy()),
        torch.from_numpy(extras[:, 1].copy()),
        torch.from_numpy(np.concatenate([own_first, extras[:, 2]], axis=1).astype(np.int16)),
        torch.from_numpy(np.concatenate([column("until"), extras[:, 3]], axis=1).astype(np.int16)),
    )
    ids, targets, classes = (torch.from_numpy(column(name)) for name in ("ids", "targets", "classes"))
    return Batch(ids, targets, classes.to(torch.uint8), edits)


class Batches(IterableDataset[Batch]):
    """Endless batches, different in every worker. Tasks are of `kinds`, in edited rows as in others."""

    def __init__(
        self,
        tokenizer_path: str,
        shape: Shape,
        seed: int,
        edited_share: float = 0.0,
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        assert shape.length < NEVER
        self.tokenizer_path = tokenizer_path
        self.shape = shape
        self.seed = seed
        self.edited_share = edited_share
        self.kinds = kinds

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        name = f"{self.seed}/{self.shape}/{worker.id if worker else 0}"
        rng, choice = Random(name), Random(f"{name}/edited")
        tokenizer = Tokenizer.from_file(self.tokenizer_path)
        shape, kinds = self.shape, self.kinds
        while True:
            # The easy stage has files of a few lines and nothing worth cutting.
            if choice.random() < self.edited_share and not shape.easy:
                yield edited_batch(
                    [make_edited_row(rng, tokenizer, shape, kinds) for _ in range(shape.num_rows)], shape
                )
            else:
                yield ordinary_batch([make_row(rng, tokenizer, shape, kinds) for _ in range(shape.num_rows)])
