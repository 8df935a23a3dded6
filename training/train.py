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

from training.batches import Batch, Batches, Edits
from training.edited_attention import extra_keys
from training.model import use_training_kernels
from training.render import LOSS_WEIGHTS
from training.rows import Shape
from training.tasks import KINDS


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
    edited_share: float = 0.0
    """The share of batches whose tool outputs are cut out of the cache on the way; the easy stage has none."""
    kinds: tuple[str, ...] = KINDS

    def shape(self, progress: float) -> Shape:
        length = 256 if progress < self.easy_until else 1024 if progress < self.long_from else 2048
        return Shape(max(1, self.tokens_per_step // length), length, easy=progress < self.easy_until)

    def rate(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def to_device(batch: Batch, device: str) -> Batch:
    def move(part: Tensor) -> Tensor:
        return part.to(device, non_blocking=True)

    edits = batch.edits and Edits(*map(move, batch.edits))
    return Batch(move(batch.ids), move(batch.targets), move(batch.classes), edits)


def weighted_loss(model: DeepseekV2ForCausalLM, batch: Batch, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted next-token loss, and the share of trained tokens that are right by argmax."""
    edited: dict[str, Any] = {}
    if batch.edits is not None:
        extra = extra_keys(batch.edits, model.model.rotary_emb.inv_freq)
        edited = {"position_ids": batch.edits.positions, "extra_keys": extra}
    logits = model(input_ids=batch.ids, use_cache=False, **edited).logits.flatten(0, 1)
    targets, row_weights = batch.targets.flatten(), weights[batch.classes.flatten().long()]
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
    batches: Iterator[Batch] = iter(())
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
                Batches(str(tokenizer_path), shape, recipe.seed, recipe.edited_share, recipe.kinds),
                batch_size=None,
                num_workers=recipe.num_workers,
                pin_memory=fused,
                prefetch_factor=4 if recipe.num_workers else None,
            )
            batches = iter(loader)
        asked = time.monotonic()
        batch = to_device(next(batches), recipe.device)
        waited += time.monotonic() - asked
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, progress)
        with torch.autocast(recipe.device, dtype=torch.bfloat16):
            loss, right = weighted_loss(model, batch, weights)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step < 5:
            print(
                f"step {step} loss {loss.item():.4f} right {right.item():.4f} progress {progress:.3f} "
                f"{'edited' if batch.edits else 'plain'} {elapsed:.0f} s, {waited:.0f} s of it waiting for rows",
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
