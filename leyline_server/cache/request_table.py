"""The device's copy of the running requests' lists: what attention reads.

Owns two tensors and which of their rows are taken. A row is loaded when a request is admitted and patched by each step
that computes entries of it; no step sends a list again. It does not know what a request is. Engine's thread alone.

    kv_slots [R + 1, W] int32   slot of each entry; -1 where it has no KV
    kv_delta [R + 1, W] int32   by how much the entry's key is to be turned: its index - the position written at
    last_token [R + 1] int64    the token sampled last

Row R belongs to nobody: padding of a CUDA graph runs as a list there, all of it in the pool's spare slot.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leyline_server.cache.pool import upload
from leyline_server.cache.slots import PENDING, Slots


class RequestTable:
    """`num_rows` requests of up to `width` entries; `spare_slot` is the pool's padding slot."""

    def __init__(self, num_rows: int, width: int, spare_slot: int, device: torch.device) -> None:
        self.num_rows, self.width, self.spare_slot = num_rows, width, spare_slot
        self.kv_slots = torch.full((num_rows + 1, width), PENDING, dtype=torch.int32, device=device)
        self.kv_delta = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.kv_slots[num_rows] = spare_slot
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, slots: Slots, delta: NDArray[np.int32]) -> int:
        """A row for this list. [n] each; there must be a free row."""
        row, length = self._free[-1], len(slots)
        both = upload(np.stack([slots, delta]), self.kv_slots.device)
        self.kv_slots[row, :length] = both[0]
        self.kv_delta[row, :length] = both[1]
        return self._free.pop()

    def give(self, row: int) -> None:
        assert row not in self._free, "a row is given back twice"
        self._free.append(row)

    def patch(self, rows: Tensor, positions: Tensor, slots: Tensor) -> None:
        """The entries at `positions` of `rows` are about to be computed into `slots`. [n] int64 each."""
        self.kv_slots.index_put_((rows, positions), slots.int())
        # A scalar would be copied from the host, which a CUDA graph can't capture.
        self.kv_delta.index_put_((rows, positions), torch.zeros_like(slots, dtype=torch.int32))

    def check_integrity(self, row: int, slots: Slots, delta: NDArray[np.int32]) -> None:
        """Asserts that a row holds this list, as far as it has KV."""
        known = slots >= 0
        on_device = self.kv_slots[row, : len(slots)].cpu().numpy()
        assert np.array_equal(on_device[known], slots[known]), "the device's list differs"
        turned = self.kv_delta[row, : len(slots)].cpu().numpy()
        assert np.array_equal(turned[known], delta[known]), "the device's deltas differ"
