"""One packed step on the device: which tokens are computed, for whom, and what they may attend to.

Owns the translation from lists of slots to tensors. It does not know sessions or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server.cache.slots import Slots


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's part of a step.

    ids, positions [t]: the tokens computed, at their logical indices, ascending.
    slots [n]: the sequence's list up to and including the last of them; all have a slot.
    delta [n]: how far each of these stands from where it was written; None if all stand there.
    sampled: whether the last position's logits are wanted.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: Slots
    delta: NDArray[np.int32] | None
    sampled: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B sequences in one row. Indices int32 unless torch wants int64."""

    ids: Tensor  # [1, T] int64
    positions: Tensor  # [1, T] int64
    write_slots: Tensor  # [T] int64
    q_indptr: Tensor  # [B + 1]
    q_index: Tensor  # [T]
    kv_start: Tensor  # [B]
    kv_len: Tensor  # [B]
    kv_slots: Tensor  # [N]
    kv_delta: Tensor | None  # [N]; None if every delta is 0
    sampled: Tensor  # [number of sampled rows] int64, rows of T
    decode: bool  # every sequence has one query, at the end of its list
    max_len: int

    @staticmethod
    def pack(steps: Sequence[SequenceStep], device: torch.device) -> Batch:
        q_lengths = [len(step.ids) for step in steps]
        kv_lengths = [len(step.slots) for step in steps]
        q_indptr = np.concatenate([[0], np.cumsum(q_lengths)]).astype(np.int32)
        positions = np.concatenate([step.positions for step in steps])
        write = np.concatenate([step.slots[step.positions] for step in steps])
        sampled = [int(end) - 1 for step, end in zip(steps, q_indptr[1:], strict=True) if step.sampled]

        turned = any(step.delta is not None for step in steps)
        deltas = [np.zeros(len(step.slots), np.int32) if step.delta is None else step.delta for step in steps]

        def put(array: NDArray[np.generic] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(array, dtype=dtype).to(device, non_blocking=True)

        return Batch(
            ids=put(np.concatenate([step.ids for step in steps]), torch.int64)[None],
            positions=put(positions, torch.int64)[None],
            write_slots=put(write, torch.int64),
            q_indptr=put(q_indptr, torch.int32),
            q_index=put(positions, torch.int32),
            kv_start=put(np.cumsum([0, *kv_lengths[:-1]]), torch.int32),
            kv_len=put(kv_lengths, torch.int32),
            kv_slots=put(np.concatenate([step.slots for step in steps]), torch.int32),
            kv_delta=put(np.concatenate(deltas), torch.int32) if turned else None,
            sampled=put(sampled, torch.int64),
            decode=all(length == 1 for length in q_lengths),
            max_len=max(kv_lengths),
        )
