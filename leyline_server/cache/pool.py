"""The pool: the tensors in which every slot's row lives, for all layers.

Owns device memory. It does not know who holds a slot or why.

    c_kv [L, S + 1, kv_lora_rank]      latent after its norm: position-free
    k_pe [L, S + 1, qk_rope_head_dim]  rotary key, turned to the slot table's written_at

Row S, the spare slot, belongs to nobody: padding of a CUDA graph is written there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Pool:
    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        # NaN, not zero: a row that is read before it was written shows at once.
        nan = float("nan")
        self.c_kv = torch.full((num_layers, num_slots + 1, kv_lora_rank), nan, dtype=dtype, device=device)
        self.k_pe = torch.full((num_layers, num_slots + 1, qk_rope_head_dim), nan, dtype=dtype, device=device)

    @property
    def spare_slot(self) -> int:
        return self.num_slots

    @staticmethod
    def row_bytes(num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one slot."""
        return num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize

    def write(self, layer_idx: int, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        """Fills rows of one layer. slots [n] int64, c_kv [n, rank], k_pe [n, rope]."""
        self.c_kv[layer_idx, slots] = c_kv
        self.k_pe[layer_idx, slots] = k_pe

    def zero(self, slots: NDArray[np.int32]) -> None:
        """Overwrites rows, in all layers."""
        if len(slots):
            index = upload(slots, self.c_kv.device).long()
            self.c_kv[:, index] = 0
            self.k_pe[:, index] = 0


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device. Returns at once: a plain copy would wait for the step that is running there."""
    if device.type == "cpu":
        return torch.from_numpy(np.array(array))
    return pinned(array).to(device, non_blocking=True)


def pinned(array: NDArray[Any]) -> Tensor:
    """A copy in memory that a device can read by itself.

    numpy copies it: torch would wake a team of threads for more than 32k numbers, which takes 4 to 10 ms.
    """
    copy = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    copy.numpy()[...] = array
    return copy
