"""Loads a checkpoint, checks that it is what the engine can drive, and attaches it to the pool's attention.

Owns the list of refusals at load. The configuration names the architecture; the rotary probe decides what the model's
keys allow. It does not know sessions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leyline_server.model import attention
from leyline_server.model.fused import fuse
from leyline_server.model.rotary_probe import RotaryProbe, probe

ARCHITECTURES: Final = ("deepseek_v2", "deepseek_v3")


class ModelRefused(Exception):
    """The checkpoint can't be served.

    `reason` is one of NOT_FOUND, CORRUPT_CHECKPOINT, UNSUPPORTED_ARCHITECTURE, HYBRID_LAYERS, M_ROPE.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that attends over the pool, with what the rest of the server has to know of it."""

    model: PreTrainedModel
    path: Path
    digest: str
    rotary: RotaryProbe

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device


def load(path_or_id: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Reads weights (with Hugging Face's progress bar unless it is off) and prepares the model. Raises ModelRefused."""
    path = _locate(path_or_id)
    config = _read_config(path)
    _check_architecture(config)
    return prepare(_read_weights(path, dtype).to(device).eval(), path, digest(path))


def prepare(model: PreTrainedModel, path: Path, digest: str) -> LoadedModel:
    """Probes and patches a model that is on its device and in its dtype. `path` has its tokenizer."""
    rotary = probe(model)
    if model.device.type == "cuda":
        fuse(model)
    attention.attach(model)
    return LoadedModel(model, path, digest, rotary)


def _locate(path_or_id: str) -> Path:
    path = Path(path_or_id)
    if path.is_dir():
        return path
    if path.exists() or path_or_id.startswith((".", "/")):
        raise ModelRefused("NOT_FOUND", f"{path_or_id} is not a directory with a checkpoint")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=patterns))
    except Exception as error:
        raise ModelRefused("NOT_FOUND", f"{path_or_id} is no directory and could not be fetched: {error}") from error


def _read_config(path: Path) -> Any:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"{file} can't be read: {error}") from error
    if not isinstance(raw, dict) or "model_type" not in raw:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"{file} names no model_type")
    _check_raw(raw)
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"{file} is not a valid configuration: {error}") from error


def _check_raw(raw: dict[str, Any]) -> None:
    """Refuses by the reason that fits best, so that a user learns what stands in the way."""
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    assert isinstance(text, dict)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if isinstance(rope, dict) and ("mrope_section" in rope or rope.get("rope_type", rope.get("type")) == "mrope"):
        raise ModelRefused("M_ROPE", "multi-axis rotary positions have no single turn that moves a row")
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    recurrent = sorted(kind for kind in kinds if kind not in ("full_attention", "attention"))
    if recurrent or any(
        key in text for key in ("mamba_d_state", "mamba_num_heads", "linear_attn_config", "kda_config")
    ):
        kind = ", ".join(recurrent) or "recurrent"
        raise ModelRefused("HYBRID_LAYERS", f"{kind} layers keep a state that can't be cut at a token")
    if raw["model_type"] not in ARCHITECTURES:
        raise ModelRefused(
            "UNSUPPORTED_ARCHITECTURE", f"model_type {raw['model_type']!r} is not one of {', '.join(ARCHITECTURES)}"
        )


def _check_architecture(config: Any) -> None:
    for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_hidden_layers"):
        if not getattr(config, name, 0):
            raise ModelRefused("CORRUPT_CHECKPOINT", f"config.json gives no {name}")
    if config.qk_rope_head_dim % 2:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"qk_rope_head_dim is {config.qk_rope_head_dim}, which is odd")


def _read_weights(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"the weights in {path} can't be read: {error}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        keys = sorted(str(key) for key in info.get(kind, ()))
        if keys:
            what = kind.removesuffix("_keys")
            raise ModelRefused("CORRUPT_CHECKPOINT", f"{len(keys)} {what} weights in {path}, the first {keys[0]}")
    bad = next((name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()), None)
    if bad is not None:
        raise ModelRefused("CORRUPT_CHECKPOINT", f"weight {bad} in {path} has values that are not finite")
    return model


def digest(path: Path) -> str:
    """16 bytes in hex that name this checkpoint: config, tokenizer, and each weight file's size and header.

    Not the weights' every byte: that would take minutes on a large model. A safetensors header lists all tensors, and
    the first MiB of data follows it into the hash.
    """
    state = xxhash.xxh3_128()
    for file in sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors")):
        state.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            state.update(stream.read(1 << 20))
    return str(state.hexdigest())
