"""Training rows with edits are what AMORTIZE leaves: checked against Hugging Face's model over an edited cache."""

from __future__ import annotations

import re
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from leyline_server.lab.oracle import Oracle
from tests.engine import models
from training import edited_rows
from training.batches import edited_batch
from training.edited_attention import extra_keys
from training.edited_rows import Cut, EditedRow, make_edited_row, num_extras
from training.histories import CLEARED
from training.model import use_training_kernels
from training.render import CONTEXT, IGNORED, TRAINED
from training.rows import Shape

SHAPE = Shape(1, 448)


class Recorded(EditedRow):
    """A row that remembers what was done to it, R's tokens and the text's apart."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[list[int], list[int]] | list[Cut]] = []

    def append(self, ids: list[int], classes: list[int]) -> None:
        self.done.append((ids, classes))
        super().append(ids, classes)

    def edit(self, cuts: list[Cut]) -> None:
        self.done.append(cuts)
        super().edit(cuts)

    def text(self) -> list[tuple[int, int]]:
        """All that was appended, with its classes: the session as it would be without edits."""
        return [pair for step in self.done if isinstance(step, tuple) for pair in zip(*step, strict=True)]

    def edited_text(self) -> list[int]:
        ids: list[int] = []
        for step in self.done:
            if isinstance(step, tuple):
                ids += step[0]
                continue
            for start, end, replacement in reversed(step):
                ids[start:end] = replacement
        return ids

    def final(self) -> list[int]:
        return [self.ids[entry] for entry in self.entries]


@pytest.fixture(scope="module")
def stock() -> Any:
    """Softer than the engine's models, whose sharp attention makes 1e-4 of fp32's rounding within 100 tokens."""
    model = models.make("v2-moe-yarn", vocab_size=1280, num_hidden_layers=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.5
    return model


@pytest.fixture(scope="module")
def trained(stock: Any) -> Any:
    model = deepcopy(stock)
    use_training_kernels(model)
    return model


@pytest.fixture
def rows(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    monkeypatch.setattr(edited_rows, "EditedRow", Recorded)
    rng = Random(3)
    made = [make_edited_row(rng, tokenizer, SHAPE) for _ in range(40)]
    return [row for row in made if isinstance(row, Recorded)]


@torch.inference_mode()
def training_logits(model: Any, row: EditedRow, shape: Shape, turned: bool = True) -> Tensor:
    """[T, vocab]"""
    batch = edited_batch([row], shape)
    assert batch.edits is not None
    edits = batch.edits if turned else batch.edits._replace(deltas=torch.zeros_like(batch.edits.deltas))
    extra = extra_keys(edits, model.model.rotary_emb.inv_freq)
    return model(input_ids=batch.ids, position_ids=edits.positions, use_cache=False, extra_keys=extra).logits[0]


def oracle_logits(model: Any, row: Recorded) -> Tensor:
    """The same in the same order: an edit's R is computed with what is appended next."""
    oracle = Oracle(model)
    found = []
    for step in row.done:
        if isinstance(step, tuple):
            oracle.append(step[0])
            found.append(oracle.compute())
        else:
            oracle.amortize(*step)
    assert oracle.ids == row.final()
    return torch.cat(found)


def by_hand(*steps: int | list[Cut]) -> Recorded:
    """A row of random tokens: so many appended, or these cuts."""
    rng = Random(1)
    row = Recorded()
    for step in steps:
        if isinstance(step, int):
            row.append([rng.randrange(12, 1280) for _ in range(step)], [TRAINED] * step)
        else:
            row.edit(step)
    return row


HAND_MADE = {
    "one, with R": by_hand(40, [(5, 25, [90, 91])], 22),
    "one, without R": by_hand(40, [(5, 25, [])], 24),
    "R as long as the span": by_hand(40, [(5, 8, [90, 91, 92])], 21, [(30, 34, [7])], 77),
    "R longer than the span": by_hand(40, [(25, 28, [90, 91, 92, 93, 94, 95])], 18),
    "one after the other": by_hand(30, [(15, 25, [90])], 9, [(6, 12, [91, 92])], 40, [(40, 50, [])], 20),
    "a kept row moves thrice": by_hand(40, [(3, 13, [90])], 3, [(5, 9, [])], 3, [(1, 3, [91, 92, 93])], 131),
    "several at once": by_hand(50, [(5, 15, [90, 91]), (20, 30, []), (35, 36, [92])], 34),
    "an R is cut again": by_hand(40, [(10, 20, [90, 91, 92])], 5, [(11, 16, [])], 53),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_logits_are_those_over_an_edited_cache(name: str, stock: Any, trained: Any) -> None:
    row = HAND_MADE[name]
    shape = Shape(1, len(row.ids))
    expected = oracle_logits(stock, row)
    torch.testing.assert_close(training_logits(trained, row, shape), expected, atol=1e-4, rtol=0)
    unturned = training_logits(trained, row, shape, turned=False)
    assert (unturned - expected).abs().max() > 1e-2


def test_logits_of_sessions_are_those_over_an_edited_cache(stock: Any, trained: Any, rows: list[Recorded]) -> None:
    for row in rows[:3]:
        logits = training_logits(trained, row, SHAPE)
        torch.testing.assert_close(logits, oracle_logits(stock, row)[: SHAPE.length], atol=1e-4, rtol=0)


def test_padding_and_neighbours_change_nothing(trained: Any, rows: list[Recorded]) -> None:
    batch = edited_batch(rows[:3], SHAPE)
    assert batch.edits is not None
    extra = extra_keys(batch.edits, trained.model.rotary_emb.inv_freq)
    with torch.inference_mode():
        out = trained(input_ids=batch.ids, position_ids=batch.edits.positions, use_cache=False, extra_keys=extra)
    alone = torch.stack([training_logits(trained, row, SHAPE) for row in rows[:3]])
    torch.testing.assert_close(out.logits, alone, atol=1e-4, rtol=0)


def test_the_final_list_is_the_edited_text(rows: list[Recorded], tokenizer: Tokenizer) -> None:
    def with_outputs(ids: list[int]) -> tuple[str, list[str]]:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        outputs = r"(?<=<\|tool\|>)[^<]*(?=<\|end\|>)"
        return re.sub(outputs, "", text), re.findall(outputs, text)

    num_cut = 0
    for row in rows:
        assert row.final() == row.edited_text()
        assert 0 < len(row.extras) <= num_extras(SHAPE)
        around, outputs = with_outputs(row.final())
        whole_around, whole_outputs = with_outputs([token for token, _ in row.text()])
        assert around == whole_around
        for output, whole in zip(outputs, whole_outputs, strict=True):
            num_cut += output != whole
            kept = output.removesuffix(CLEARED).rstrip()
            assert output in (whole, "") or (output.endswith(CLEARED) and whole.startswith(kept))
    assert num_cut > 3 * len(rows)


def test_all_the_assistant_says_is_trained_and_no_replacement(rows: list[Recorded]) -> None:
    for row in rows:
        learnt = [pair for pair in zip(row.targets, row.classes, strict=True) if pair[1] != IGNORED]
        assert learnt == row.text()[1:]
        num_replaced = len(row.ids) - len(row.text())
        assert row.classes.count(IGNORED) == num_replaced + 1
        assert {loss_class for _, loss_class in learnt} == {CONTEXT, TRAINED}


def test_the_end_of_what_the_assistant_says_is_computed_after_an_edit(rows: list[Recorded]) -> None:
    """As on the server, where the last token of a generation is pending until something follows it."""
    after = [row.done[i + 1] for row in rows for i, step in enumerate(row.done[:-1]) if isinstance(step, list)]
    assert all(isinstance(step, tuple) for step in after)
    assert [TRAINED] in [step[1] for step in after if isinstance(step, tuple)]
