"""The pool: the tensors in which every slot's row lives, for all layers.

Owns device memory. It does not know who holds a slot or why.

    c_kv [L, S + 1, kv_lora_rank]      latent after its norm: position-free
    k_pe [L, S + 1, qk_rope_head_dim]  rotary key, turned to written_at
    written_at [S + 1] int32           the device's copy of the slot table's column

Row S belongs to nobody: padding writes go there.
"""

from __future__ import annotations

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
        self.written_at = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    @staticmethod
    def row_bytes(num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one slot."""
        return num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype.itemsize

    def place(self, slots: Tensor, positions: Tensor) -> None:
        """Notes on the device at which positions the slots are about to be written. [n] int64, [n] int32."""
        self.written_at[slots] = positions

    def write(self, layer_idx: int, slots: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
        """Fills rows of one layer. slots [n] int64, c_kv [n, rank], k_pe [n, rope]."""
        self.c_kv[layer_idx, slots] = c_kv
        self.k_pe[layer_idx, slots] = k_pe

    def zero(self, slots: NDArray[np.int32]) -> None:
        """Overwrites rows, in all layers."""
        if len(slots):
            index = torch.as_tensor(slots, dtype=torch.int64, device=self.c_kv.device)
            self.c_kv[:, index] = 0
            self.k_pe[:, index] = 0
