"""Hugging Face's MLA modelling code on the pool: no modelling code is copied.

HF's attention hands the compressed, rotated latents to `cache.update`, expands them with `expand_kv`, and calls the
attention function that is registered under the configuration's name. So here: a cache whose `update` writes rows into
the pool, an `expand_kv` that passes the latents on, and an attention function that absorbs `kv_b_proj` and attends
over slots. Verified on transformers 5.17 to 5.24, `deepseek_v2` and `deepseek_v3`.

Owns these three seams and nothing of sessions. The symbols stand in `leyline_kernels.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

import leyline_kernels
from leyline_kernels import RotaryLayout
from leyline_server.cache.pool import Pool
from leyline_server.model.batch import Batch, Expanded, Extend

_NAME = "leyline"


class PoolCache(Cache):
    """What HF takes for its cache in one step: writes the step's rows into the pool.

    Lives for one forward pass. `layout` and `inv_freq` come from the rotary probe.
    """

    def __init__(self, pool: Pool, batch: Batch, inv_freq: Tensor, layout: RotaryLayout) -> None:
        super().__init__(layers=[])
        self.pool, self.batch, self.inv_freq, self.layout = pool, batch, inv_freq, layout

    def update(self, c_kv: Tensor, k_pe: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """c_kv [1, 1, T, rank] after its norm, k_pe [1, 1, T, rope] rotated: HF's own values, stored as they are."""
        self.pool.write(layer_idx, self.batch.write_slots, c_kv[0, 0], k_pe[0, 0])
        return c_kv, k_pe

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing in HF may derive a position from the cache: positions are given."""
        return 0


class _Lists(NamedTuple):
    """What decode and extend attend over, in the order of their arguments."""

    c_kv: Tensor
    k_pe: Tensor
    kv_start: Tensor
    kv_len: Tensor
    kv_slots: Tensor
    kv_delta: Tensor | None
    inv_freq: Tensor
    layout: RotaryLayout
    scale: float


def attend(
    module: Any,
    query: Tensor,
    c_kv: Tensor,
    k_pe: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    leyline: PoolCache,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query [1, H, T, nope + rope] -> [1, T, H, v_head_dim].

    Reads the pool, not c_kv and k_pe: `PoolCache.update` has just put them there.
    """
    if isinstance(leyline.batch.queries, Expanded):
        return _attend_expanded(module, query[0].transpose(0, 1), scaling, leyline, leyline.batch.queries), None
    return _attend_absorbed(module, query[0], scaling, leyline), None


def _attend_absorbed(module: Any, query: Tensor, scale: float, leyline: PoolCache) -> Tensor:
    """Attends to the latents themselves, with kv_b_proj in query and output: query [H, T, nope + rope]."""
    pool, batch, layer_idx = leyline.pool, leyline.batch, module.layer_idx
    nope = module.qk_nope_head_dim
    q_nope, q_pe = query.split([nope, query.shape[-1] - nope], dim=-1)
    weight = module.kv_b_proj.weight.view(query.shape[0], -1, pool.c_kv.shape[-1])
    w_uk, w_uv = weight[:, :nope], weight[:, nope:]
    q_latent = torch.bmm(q_nope, w_uk).transpose(0, 1)  # [T, H, rank]
    q_pe = q_pe.transpose(0, 1)
    over = _Lists(
        pool.c_kv[layer_idx],
        pool.k_pe[layer_idx],
        batch.kv_start,
        batch.kv_len,
        batch.kv_slots,
        batch.kv_delta,
        leyline.inv_freq,
        leyline.layout,
        scale,
    )
    if batch.queries is None:
        out = leyline_kernels.decode(q_latent, q_pe, *over, max_len=batch.max_len)
    else:
        assert isinstance(batch.queries, Extend)
        out = leyline_kernels.extend(q_latent, q_pe, batch.queries.q_indptr, batch.queries.q_index, *over)
    return torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)[None]


def _attend_expanded(module: Any, query: Tensor, scale: float, leyline: PoolCache, over: Expanded) -> Tensor:
    """Expands the lists' latents to keys and values of every head: query [T, H, nope + rope]."""
    pool, layer_idx = leyline.pool, module.layer_idx
    latent, keys = leyline_kernels.gather(
        pool.c_kv[layer_idx], pool.k_pe[layer_idx], over.kv_slots, over.kv_delta, leyline.inv_freq, leyline.layout
    )
    kv = module.kv_b_proj(latent).view(len(latent), query.shape[1], -1)
    nope = module.qk_nope_head_dim
    return leyline_kernels.prefill(query, kv, keys, over.q_indptr, over.q_index, over.kv_indptr, scale, nope)[None]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Causality is by logical index, inside the kernels."""


def _pass_latents(module: nn.Module, c_kv: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
    return c_kv, k_pe


def attach(model: Any) -> None:
    """Makes a loaded model attend over the pool. From then on it needs a `PoolCache` in every call."""
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, _no_mask)
    model.set_attn_implementation(_NAME)
    for module in model.modules():
        if hasattr(module, "expand_kv"):
            module.expand_kv = MethodType(_pass_latents, module)


@contextmanager
def detached(model: Any) -> Iterator[None]:
    """Within it an attached model attends as Hugging Face has it, over a cache of Hugging Face's. No engine may run."""
    for module in model.modules():
        vars(module).pop("expand_kv", None)
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        attach(model)


def cache_argument(module: nn.Module) -> str:
    """What this transformers calls the cache: "cache", or "past_key_values" before 5.2x."""
    return "cache" if "cache" in signature(module.forward).parameters else "past_key_values"


@torch.inference_mode()
def forward(model: Any, cache: PoolCache) -> Tensor:
    """One step of the model over a batch; returns logits [number of sampled rows, vocab] in fp32."""
    batch = cache.batch
    out = model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        use_cache=True,
        logits_to_keep=batch.sampled,
        leyline=cache,
        **{cache_argument(model): cache},
    )
    return out.logits[0].float()
