"""How large pool and steps are and where they live, from what the machine has.

Owns these choices. Asks torch and the operating system; changes nothing.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from leyline_server.cache.pool import Pool
from leyline_server.config import ServerConfig, SettingsError
from leyline_server.model.load import LoadedModel

_MAX_CPU_SLOTS: Final = 1 << 16
"""A CPU attends over far fewer tokens than its memory holds; more has to be asked for."""


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16


def choose_slots(config: ServerConfig, model: LoadedModel) -> int:
    """Tokens the pool holds: as asked, or what the share of free memory holds.

    Raises MemoryError when not even that is room for 16 tokens.
    """
    if config.slots is not None:
        return config.slots
    shape = model.config
    row = Pool.row_bytes(shape.num_hidden_layers, shape.kv_lora_rank, shape.qk_rope_head_dim, model.dtype)
    slots = int(_free_bytes(model.device) * config.memory_fraction) // row
    if model.device.type == "cpu":
        slots = min(slots, _MAX_CPU_SLOTS)
    if slots < 16:
        raise MemoryError(f"the free memory of {model.device} has no room for a pool: one token takes {row} bytes")
    return slots


def choose_chunks(config: ServerConfig, device: torch.device) -> tuple[int, int]:
    """Pending tokens in one step: beside others' tokens, and when one request has the device to itself.

    A GPU needs many to be busy; on a CPU they would hold up the others. What was asked for holds for both.
    """
    if config.prefill_chunk is not None:
        return config.prefill_chunk, config.prefill_chunk
    return (2048, 8192) if device.type == "cuda" else (512, 512)


def choose_context(config: ServerConfig, model: LoadedModel, num_slots: int) -> int:
    """Tokens in one session: as asked, or what model and pool allow. Raises SettingsError for more than that."""
    positions = int(model.config.max_position_embeddings)
    if config.max_context is None:
        return min(num_slots, positions)
    for what, bound in (("the model's positions", positions), ("the pool's slots", num_slots)):
        if config.max_context > bound:
            raise SettingsError(f"max_context {config.max_context} is beyond {what}: {bound}")
    return config.max_context


def what_fits(model: LoadedModel, num_slots: int, max_context: int, max_running: int, chunks: tuple[int, int]) -> str:
    """One line for whoever starts the server."""
    shape = model.config
    row = Pool.row_bytes(shape.num_hidden_layers, shape.kv_lora_rank, shape.qk_rope_head_dim, model.dtype)
    beside, alone = chunks
    size = f"{num_slots * row / 1e9:,.1f} GB, {row:,} bytes a token"
    holds = f"{num_slots // max_context:,} sessions of {max_context:,} tokens, or {num_slots // 1024:,} of 1,024"
    steps = f"{max_running} requests run at once, {beside:,} pending tokens a step, {alone:,} alone"
    return f"pool of {size}: {holds}; {steps}"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
