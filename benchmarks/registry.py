"""What is measured on: shapes of models, their random weights, token ids, and the bed that holds them for a run.

Owns the inputs of every benchmark. The full shape is DeepSeek-V2-Lite's, with random weights: speed does not depend
on them. A model is made straight on its device; no file is read or written.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM

from leyline_server.config import ServerConfig
from leyline_server.model import load as loading
from leyline_server.model.load import LoadedModel
from leyline_server.model.tokenizer import REPLACEMENT, TextTokenizer
from leyline_server.server import TINY, Parts, build

NAMESPACE: Final = ("bench", "random weights")


@dataclass(frozen=True, slots=True)
class Shape:
    """`full`: the sizes of the issue's cases, and its goals; else the same code at sizes that take seconds."""

    name: str
    about: str
    config: dict[str, Any]
    full: bool = False


_LITE: Final[dict[str, Any]] = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    # Those of the embedded model's tokenizer, which stands before these weights.
    "bos_token_id": 1,
    "eos_token_id": 6,
}
_TOY: Final[dict[str, Any]] = {
    **_LITE,
    "vocab_size": 1280,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {**_LITE["rope_parameters"], "factor": 8.0, "original_max_position_embeddings": 1024},
}
SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("lite", "DeepSeek-V2-Lite's shape, random weights", _LITE, full=True),
        Shape("cut", "DeepSeek-V2-Lite's shape cut to 2 layers, random weights", {**_LITE, "num_hidden_layers": 2}),
        Shape("toy", "a toy of 2 layers, random weights", _TOY),
    )
}


def random_model(config: dict[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 7) -> Any:
    """Hugging Face's own model, unpatched, made on the device. The same seed gives the same weights in one dtype.

    Queries and latents are scaled up so that attention is far from uniform: else a wrong row would not show.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = DeepseekV2ForCausalLM(DeepseekV2Config(**config))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                scale = 4.0 if "kv_a_proj" in name or "q_proj" in name else 1.0
                weight.normal_(0.0, scale * weight.shape[-1] ** -0.5, generator=generator)
    return model.eval()


class Bed:
    """Everything a run shares: one model for all benchmarks, one engine at a time.

    Args:
        model_path: a checkpoint to load instead of random weights of `shape`.
        traces: the directory of recorded conversations, if there is one.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        model_path: str | None = None,
        traces: Path | None = None,
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.model_path, self.traces = model_path, traces
        self.until = math.inf  # the moment of the monotonic clock after which nothing long is begun
        self.warmed: set[tuple[str, ...]] = set()  # what has run once in this process, unmeasured
        self._parts: Parts | None = None

    @property
    def full(self) -> bool:
        """Whether the issue's goals apply: the full shape, on a GPU."""
        return self.shape.full and self.device.type == "cuda"

    @property
    def about(self) -> str:
        return f"checkpoint {Path(self.model_path).name}" if self.model_path else self.shape.about

    def size(self, full: int, small: int) -> int:
        """A size of the issue's, or one of the same code path that takes seconds."""
        return full if self.shape.full else small

    def raw(self) -> Any:
        """Hugging Face's model as it comes, with weights of its own: a rival. The caller drops it."""
        if self.model_path:
            model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=self.dtype, local_files_only=True)
            return model.to(self.device).eval()
        return random_model(self.shape.config, self.device, self.dtype)

    @cached_property
    def model(self) -> LoadedModel:
        """The model as the server runs it. Behind random weights stand the embedded model's tokenizer and format."""
        if self.model_path:
            return loading.load(self.model_path, self.dtype, self.device)
        return loading.prepare(random_model(self.shape.config, self.device, self.dtype), TINY, self.shape.name)

    @property
    def parts_chunk(self) -> int:
        """Pending tokens in one step of `parts` beside decodes, where nothing else is asked for."""
        return self.size(2048, 32)

    def parts(self, prefill_chunk: int | None = None) -> Parts:
        """A built server with an empty cache. The last one is used again where the chunk is the same, else dropped.

        prefill_chunk: as in the server's settings; unset is what a server without settings does, at the full shape.
        """
        chunk = prefill_chunk or (None if self.shape.full else self.parts_chunk)
        if self._parts is not None and self._parts.config.prefill_chunk == chunk:
            empty(self._parts)
            return self._parts
        self.drop()
        config = ServerConfig(
            model=self.model_path or "tiny",
            port=0,
            slots=self.size(700_000, 4096),
            prefill_chunk=chunk,
            max_queue=512,
            drain=1.0,
            device=self.device.type,
        )
        self._parts = build(config, self.model)
        return self._parts

    def drop(self) -> None:
        """Lets go of the engine that `parts` holds for the next caller, so that its memory is free."""
        self._parts = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer.from_dir(self.model_path or TINY)

    @property
    def vocab(self) -> int:
        """Ids below it are texts of the tokenizer; the engine samples only these."""
        return self._tokenizer.vocab_size

    @cached_property
    def text_ids(self) -> list[int]:
        """Ids that each stand for whole printable characters: a text of them may be cut anywhere."""
        tokenizer = self._tokenizer
        texts = ((index, tokenizer.decode([index])) for index in range(self.vocab))
        return [index for index, text in texts if text and text.isprintable() and REPLACEMENT not in text]

    def ids(self, count: int, seed: int) -> list[int]:
        """Random ids of whole characters; another seed gives another text, so that nothing is found in a cache."""
        pool = np.asarray(self.text_ids)
        chosen: list[int] = pool[np.random.default_rng(seed).integers(0, len(pool), count)].tolist()
        return chosen


def empty(parts: Parts) -> None:
    """Closes every sequence of the engine and empties its caches."""
    engine = parts.engine
    for sequence in list(engine.sequences):
        engine.close(sequence)
    engine.cache.clear_caches()


@contextmanager
def rival(bed: Bed) -> Iterator[Any]:
    """Hugging Face's own model, in memory only inside the block."""
    model: Any = bed.raw()
    try:
        yield model
    finally:
        del model
        gc.collect()
        if bed.device.type == "cuda":
            torch.cuda.empty_cache()
