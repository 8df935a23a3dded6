"""How far stored latents are from those that the text as it stands would give: what a repair by share goes by.

Owns a model of two layers that shares the weights. A row of the first layer depends on its token alone (its key on the
position too, and attention turns it), so stored rows serve as they are; the second layer's latent is the first that
what stands before has a part in. After CacheBlend (Yao et al., arXiv 2405.16444), which finds the entries that deviate
there to be those that deviate further up.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from leyline_server.cache.pool import Pool, upload
from leyline_server.cache.request_table import RequestTable
from leyline_server.cache.slots import Slots
from leyline_server.model.attention import PoolCache, cache_argument
from leyline_server.model.batch import Batch, Form, PassSize, PrefillPart, num_pairs, pack, packed, unpack
from leyline_server.model.load import LoadedModel

_LAYERS: Final = 2


class _Comparing(PoolCache):
    """stored [T] int64: the slots of the rows to compare with. deviation [T] fp32: relative, of the second layer."""

    def __init__(self, stored: Tensor, *args: Any) -> None:
        super().__init__(*args)
        self._stored, self.deviation = stored, torch.zeros(len(stored))

    def update(self, c_kv: Tensor, k_pe: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx == _LAYERS - 1:
            old, new = self.pool.c_kv[layer_idx, self._stored].float(), c_kv[0, 0].float()
            self.deviation = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp(min=1e-9)
        return super().update(c_kv, k_pe, layer_idx, *args, **kwargs)


class DeviationProbe:
    """chunk: entries of one pass."""

    def __init__(self, model: LoadedModel, pool: Pool, table: RequestTable, form: Form, chunk: int) -> None:
        self._pool, self._table, self._form, self._chunk = pool, table, form, chunk
        self._rotary = model.rotary
        self._layers = None if self.refused(model) else _first_layers(model.model.base_model, _LAYERS)

    @staticmethod
    def refused(model: LoadedModel) -> str:
        """Why nothing can be measured; empty when it can."""
        count = model.config.num_hidden_layers
        return "" if count >= _LAYERS else f"it has {count} layer, and deviations are seen from the second on"

    @torch.inference_mode()
    def measure(
        self, row: int, ids: NDArray[np.int32], index: NDArray[np.int64], fresh: Slots, stored: Slots
    ) -> NDArray[np.float32]:
        """The deviations [n] of a list's entries at `index` [n], ascending; waits for the device.

        row: the list's, of the request table. fresh: slots for entries without KV, written in the first two layers;
        PENDING for the others. stored: the slots of those others; an entry without KV has PENDING, and no deviation.
        """
        found = []
        for start in range(0, len(index), self._chunk):
            part = slice(start, start + self._chunk)
            found.append(self._pass(row, ids[part], index[part], fresh[part], stored[part]))
        deviation = torch.cat(found).cpu().numpy()
        return np.where(stored >= 0, deviation, 0).astype(np.float32)

    def _pass(self, row: int, ids: NDArray[np.int32], index: NDArray[np.int64], fresh: Slots, stored: Slots) -> Tensor:
        spare, device = self._pool.spare_slot, self._pool.c_kv.device
        # What has KV is computed into the spare slot, and is patched in the row of padding: its own list keeps it.
        one = PrefillPart(row, ids, index, np.where(fresh >= 0, fresh, spare).astype(np.int32), True, None)
        size = PassSize.of([one], self._form.expands(num_pairs([one]), one.kv_len))
        on = unpack(upload(pack([one], size, self._table), device), size)
        on["rows"] = upload(np.where(fresh >= 0, row, self._table.num_rows).astype(np.int32), device)
        compared = upload(np.where(stored >= 0, stored, spare).astype(np.int64), device)
        return self._run(packed(on, size, True, self._table), compared)

    def _run(self, batch: Batch, compared: Tensor) -> Tensor:
        layers = self._layers
        assert layers is not None
        cache = _Comparing(compared, self._pool, batch, self._rotary.inv_freq, self._rotary.layout or "halves")
        layers(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=True,
            leyline=cache,
            **{cache_argument(layers): cache},
        )
        return cache.deviation


def _first_layers(model: Any, count: int) -> Any:
    """A model of the first layers. It shares all weights with the one it is made from, which stays as it is."""
    short, config = copy.copy(model), copy.copy(model.config)
    config.num_hidden_layers = count
    short._modules = dict(model._modules)
    short.layers, short.config = nn.ModuleList(list(model.layers[:count])), config
    return short
