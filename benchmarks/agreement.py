"""Whether the engine says what Hugging Face's own model says: checked before any of its times is taken.

On random weights cut to two layers (all widths are the real ones), in the run's dtype, against Hugging Face's unpatched
forward in fp32. Compared are greedy tokens: each must be within a margin of the reference's best. A wrong row makes
tokens arbitrary, and an arbitrary one is three deviations away.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import drive
from benchmarks.bench import require
from benchmarks.registry import Bed, random_model
from leyline_server.config import ServerConfig
from leyline_server.engine.engine import Engine, RowEdit
from leyline_server.engine.local import LocalEngine
from leyline_server.model import load as loading
from leyline_server.server import TINY, build

MARGIN = 1.0  # deviations of the logits below the best one
_checked: set[tuple[str, str, str, float | None]] = set()


def check(bed: Bed, handicap: float | None = None) -> None:
    """Once a run, model and handicap of the expanded form. Raises WrongResult."""
    key = (bed.about, str(bed.device), str(bed.dtype), handicap)
    if key in _checked:
        return
    wide, engine = _pair(bed)
    if handicap is not None:
        engine.runner.form = replace(engine.runner.form, handicap=handicap)
    texts = [bed.ids(bed.size(700, 90) + 13 * seed, seed=1000 + seed) for seed in range(6)]
    sequences = [drive.open_with(engine, ids) for ids in texts]
    watches = [drive.generate(engine, sequence, 4) for sequence in sequences]
    drive.run(engine, *watches)
    bound = min(bed.vocab, int(wide.config.vocab_size))
    for ids, watch in zip(texts, watches, strict=True):
        require_close("generated", wide, ids, watch.tokens, bound)
    wrong = far(wide, texts[0], watches[1].tokens, bound) + far(wide, texts[2], watches[3].tokens, bound)
    require(wrong > MARGIN, "the check passes tokens of another text")
    _check_forget(engine, sequences[0], wide, bed, bound)
    _checked.add(key)


def _pair(bed: Bed) -> tuple[Any, LocalEngine]:
    """Hugging Face's model in fp32 and the engine over the same weights."""
    settings: dict[str, Any] = {"slots": bed.size(16_384, 2048), "prefill_chunk": bed.size(512, 32), "port": 0}
    settings["device"] = bed.device.type
    if bed.model_path:
        return _plain(bed.raw().float()), build(ServerConfig(model=bed.model_path, **settings), bed.model).engine
    raw = random_model({**bed.shape.config, "num_hidden_layers": 2}, bed.device, bed.dtype)
    wide = _plain(deepcopy(raw).float())
    return wide, build(ServerConfig(**settings), loading.prepare(raw, TINY, "agreement")).engine


def _plain(model: Any) -> Any:
    """With experts computed one by one: the grouped product takes bf16 alone."""
    model.config._experts_implementation = "eager"
    return model


def _check_forget(engine: Engine, sequence: int, wide: Any, bed: Bed, bound: int) -> None:
    """A FORGET leaves what a fresh prefill of the edited ids has."""
    length = engine.length(sequence)
    engine.splice(sequence, [RowEdit(length // 3, length // 2, tuple(bed.ids(5, seed=77)), "f1", forget=True)])
    ids = engine.ids(sequence)
    watch = drive.generate(engine, sequence, 3)
    drive.run(engine, watch)
    require_close("generated after a FORGET", wide, ids, watch.tokens, bound)


def require_close(what: str, wide: Any, ids: Sequence[int], tokens: Sequence[int], bound: int) -> None:
    """Raises WrongResult when a token is not among the reference's best."""
    off = far(wide, ids, tokens, bound)
    require(off <= MARGIN, f"{what}: a token is {off:.2f} deviations below the best of Hugging Face's model")


def far(wide: Any, ids: Sequence[int], tokens: Sequence[int], bound: int) -> float:
    """How far the worst of the greedy tokens after `ids` is below the reference's best, in deviations."""
    logits = _logits(wide, [*ids, *tokens])[len(ids) - 1 : -1, :bound]
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return float(((logits.max(1).values - chosen) / logits.std(1)).max())


@torch.inference_mode()
def _logits(wide: Any, ids: Sequence[int]) -> Tensor:
    device = next(wide.parameters()).device
    logits: Tensor = wide(torch.tensor([list(ids)], device=device), use_cache=False).logits[0].float()
    return logits
