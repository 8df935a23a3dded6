"""How large pool and steps are and where they live, from what the machine has.

Owns these choices. Asks torch and the operating system; changes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from leyline_server.cache.pool import Pool
from leyline_server.config import ServerConfig, SettingsError
from leyline_server.model.load import LoadedModel

_MAX_CPU_SLOTS: Final = 1 << 16
"""A CPU attends over far fewer tokens than its memory holds; more has to be asked for."""

_MAX_REPLACEMENT: Final = 4096
_SHORT: Final = 1024
"""Tokens of a session that is short, for the line that says how many fit."""


def choose_device(name: str) -> torch.device:
    """Raises SettingsError for what is no device, or none of this machine's."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"device: {name!r} is none of auto, cpu, cuda, cuda:0, ..") from error
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device: {name!r} is none of auto, cpu, cuda, cuda:0, ..")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise SettingsError(f"device: {name!r} was asked for, and there is no GPU that torch can use")
        if device.index is not None and device.index >= count:
            raise SettingsError(f"device: {name!r} was asked for, and the last of {count} is cuda:{count - 1}")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16


def choose_slots(config: ServerConfig, model: LoadedModel) -> int:
    """Tokens the pool holds: as asked, or what the share of free memory holds.

    Raises SettingsError for more than all of the free memory, and MemoryError when the share of it is no room for 16.
    """
    row, free = _row_bytes(model), _free_bytes(model.device)
    if config.slots is not None:
        if config.slots * row > free:
            asked = f"slots: {config.slots:,} of {row:,} bytes take {_size(config.slots * row)}"
            raise SettingsError(f"{asked}; the free memory of {model.device}, {_size(free)}, holds {free // row:,}")
        return config.slots
    slots = int(free * config.memory_fraction) // row
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


def choose_replacement(config: ServerConfig, max_context: int) -> int:
    """Tokens in one R: as asked, or 4,096, and no more than a session. Raises SettingsError for more than that."""
    if config.max_replacement is None:
        return min(_MAX_REPLACEMENT, max_context)
    if config.max_replacement > max_context:
        raise SettingsError(f"max_replacement {config.max_replacement} is beyond a session's tokens: {max_context}")
    return config.max_replacement


def what_fits(
    model: LoadedModel, num_slots: int, max_context: int, chunks: tuple[int, int], max_sessions: int, max_running: int
) -> str:
    """One line for whoever starts the server."""
    row = _row_bytes(model)
    beside, alone = chunks
    whole, short = (min(num_slots // length, max_sessions) for length in (max_context, _SHORT))
    holds = f"{_count(whole, 'session')} of {max_context:,} tokens"
    if max_context > _SHORT and short > whole:
        holds += f", or {short:,} of {_SHORT:,}"
    # A session has one request at a time, and each takes a slot at least.
    running = _count(min(max_running, max_sessions, num_slots), "request")
    steps = f"at most {running} at once, {beside:,} pending tokens a step, {alone:,} alone"
    return f"pool of {_size(num_slots * row)}, {row:,} bytes a token: {holds}; {steps}"


def _row_bytes(model: LoadedModel) -> int:
    shape = model.config
    return Pool.row_bytes(shape.num_hidden_layers, shape.kv_lora_rank, shape.qk_rope_head_dim, model.dtype)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:  # what a file cache holds is free too
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
