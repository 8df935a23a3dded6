"""The training loop: AdamW, cosine to zero, rows that grow longer; ends by steps or by minutes, whichever is first."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DeepseekV2ForCausalLM

from training.model import use_training_kernels
from training.render import LOSS_WEIGHTS
from training.rows import Batches, Shape


@dataclass(frozen=True)
class Recipe:
    """What a run is bounded by and how it learns."""

    steps: int = 4000
    minutes: float = 60.0
    tokens_per_step: int = 96 * 1024
    learning_rate: float = 1.5e-3
    warmup_steps: int = 150
    weight_decay: float = 0.05
    seed: int = 0
    num_workers: int = 14
    device: str = "cuda"
    easy_until: float = 0.125
    long_from: float = 0.6
    """Shares of the run: up to the first, short rows with small files; from the second on, rows of 2,048 tokens."""

    def shape(self, progress: float) -> Shape:
        length = 256 if progress < self.easy_until else 1024 if progress < self.long_from else 2048
        return Shape(max(1, self.tokens_per_step // length), length, easy=progress < self.easy_until)

    def rate(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def weighted_loss(model: nn.Module, ids: Tensor, classes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted next-token loss, and the share of trained tokens that are right by argmax."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets, row_weights = ids[:, 1:].flatten(), weights[classes[:, 1:].flatten().long()]
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    is_trained = row_weights == 1.0
    right = (logits.detach().argmax(-1) == targets) & is_trained
    return (losses * row_weights).sum() / row_weights.sum(), right.sum() / is_trained.sum()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms don't."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def train(model: DeepseekV2ForCausalLM, tokenizer_path: Path, recipe: Recipe, checkpoint: Path | None = None) -> None:
    """Trains `model` in place; writes bf16 weights to `checkpoint` now and then, so that a cut-off run is not lost."""
    model.to(recipe.device).train()
    use_training_kernels(model)
    torch.set_float32_matmul_precision("high")
    fused = recipe.device == "cuda"
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=0.0, betas=(0.9, 0.95), fused=fused)
    weights = torch.tensor(LOSS_WEIGHTS, device=recipe.device)
    shape: Shape | None = None
    batches: Iterator[tuple[Tensor, Tensor]] = iter(())
    waited = 0.0
    start = last_save = time.monotonic()
    for step in range(recipe.steps):
        elapsed = time.monotonic() - start
        progress = max(step / recipe.steps, elapsed / (60 * recipe.minutes))
        if progress >= 1:
            break
        if shape != recipe.shape(progress):
            shape = recipe.shape(progress)
            print(f"step {step}: rows of {shape}", flush=True)
            loader = DataLoader(
                Batches(str(tokenizer_path), shape, recipe.seed),
                batch_size=None,
                num_workers=recipe.num_workers,
                pin_memory=fused,
                prefetch_factor=4 if recipe.num_workers else None,
            )
            batches = iter(loader)
        asked = time.monotonic()
        ids, classes = next(batches)
        waited += time.monotonic() - asked
        ids, classes = (part.to(recipe.device, non_blocking=True) for part in (ids, classes))
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, progress)
        with torch.autocast(recipe.device, dtype=torch.bfloat16):
            loss, right = weighted_loss(model, ids, classes, weights)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step < 5:
            print(
                f"step {step} loss {loss.item():.4f} right {right.item():.4f} progress {progress:.3f} "
                f"{elapsed:.0f} s, {waited:.0f} s of it waiting for rows",
                flush=True,
            )
            if checkpoint is not None and time.monotonic() - last_save > 120:
                save_weights(model, checkpoint)
                last_save = time.monotonic()


def save_weights(model: DeepseekV2ForCausalLM, out: Path) -> None:
    """Writes config and bf16 weights as `from_pretrained` reads them; `model` keeps its own precision."""
    config = type(model.config)(**model.config.to_dict())
    config._attn_implementation = "sdpa"
    stock = DeepseekV2ForCausalLM(config)
    stock.load_state_dict(model.state_dict())
    stock.to(torch.bfloat16).save_pretrained(out)
