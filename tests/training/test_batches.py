"""Batches hold rows of the kinds that were asked for, edited ones in their share; ordinary ones are as they were."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
import torch
from tokenizers import Tokenizer

from leyline_server.server import TINY
from tests.engine import models
from training import make
from training.batches import Batches
from training.rows import Shape, make_row
from training.tasks import ALL_KINDS, KINDS, SessionMaker, make_session
from training.train import Recipe, train
from training.transcripts import transcript

TOKENIZER = TINY / "tokenizer.json"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kinds of all tasks that are made."""
    kinds = set[str]()
    next_task = SessionMaker.next_task

    def noted(maker: SessionMaker, kind: str | None = None) -> Any:
        task = next_task(maker, kind)
        kinds.add(task.kind)
        return task

    monkeypatch.setattr(SessionMaker, "next_task", noted)
    return kinds


def test_ordinary_rows_are_as_they_were(tokenizer: Tokenizer) -> None:
    for shape, seen in ((Shape(1, 256, easy=True), 3986787450), (Shape(1, 1024), 2691227315)):
        rng = Random(5)
        assert crc32(repr([make_row(rng, tokenizer, shape) for _ in range(3)]).encode()) == seen
    batch = next(iter(Batches(str(TOKENIZER), Shape(2, 256), seed=7)))
    assert batch.edits is None
    assert crc32(batch.ids.numpy().tobytes()) == 3165417979
    assert torch.equal(batch.targets[:, :-1], batch.ids[:, 1:])
    assert not batch.classes[:, -1].any()


def test_edited_batches_come_in_their_share() -> None:
    batches = iter(Batches(str(TOKENIZER), Shape(1, 256), seed=7, edited_share=0.33))
    assert 20 < sum(next(batches).edits is not None for _ in range(100)) < 46
    easy = iter(Batches(str(TOKENIZER), Shape(1, 256, easy=True), seed=7, edited_share=1.0))
    assert next(easy).edits is None


def test_two_hops_is_asked_like_two_files_and_only_on_demand() -> None:
    assert (*KINDS, "two_hops") == ALL_KINDS
    asked = make_session(Random(0), 200).tasks
    assert "two_hops" not in {task.kind for task in asked}
    assert "two_hops" in {task.kind for task in make_session(Random(0), 40, kinds=ALL_KINDS).tasks}
    hop_first = set()
    for seed in range(20):
        task = SessionMaker(Random(seed)).next_task("two_hops")
        _, call, *outputs, second_call, found, answer = transcript(task, {})
        assert len(call.calls) == len(outputs) == 2
        target = second_call.calls[0].arguments["path"]
        hops = [f"see {target}" in output.content for output in outputs]
        assert hops.count(True) == 1
        hop_first.add(hops[0])
        values = answer.content.split(", ")
        assert values[hops.index(True)] in found.content
        assert values[hops.index(False)] in outputs[hops.index(False)].content
    assert hop_first == {True, False}


@pytest.mark.parametrize("edited_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kinds", [KINDS, ("one_hop", "two_hops")])
def test_edits_leave_the_kinds_of_task_as_they_are(
    edited_share: float, kinds: tuple[str, ...], drawn: set[str]
) -> None:
    """Else a checkpoint trained with edits and one without differ in two things."""
    more = {} if kinds == KINDS else {"kinds": kinds}
    batches = iter(Batches(str(TOKENIZER), Shape(2, 512), seed=7, edited_share=edited_share, **more))
    assert {next(batches).edits is not None for _ in range(20)} == {0.0: {False}, 1.0: {True}}.get(
        edited_share, {False, True}
    )
    assert drawn == set(kinds)


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ("", KINDS),
        ("--edited-share 0.3", KINDS),
        ("--edited-share 0.3 --kinds all", ALL_KINDS),
        ("--kinds all", ALL_KINDS),
        ("--kinds two_hops one_hop one_hop", ("one_hop", "two_hops")),
    ],
)
def test_kinds_are_a_flag_of_their_own(
    flags: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes: list[Recipe] = []
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    monkeypatch.setattr(make, "new_model", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(make, "train", lambda model, path, recipe, checkpoint: recipes.append(recipe))
    monkeypatch.setattr(make, "save_weights", lambda *_: None)
    make.main(["--out", str(tmp_path), *flags.split()])
    assert [(recipe.kinds, recipe.edited_share) for recipe in recipes] == [(kinds, 0.3 if "edited" in flags else 0.0)]


def test_a_run_with_edited_batches_learns(capsys: pytest.CaptureFixture[str], drawn: set[str]) -> None:
    model = models.make("v2-moe-yarn", vocab_size=1280, num_hidden_layers=2)
    kinds = ("one_hop", "two_hops")
    recipe = Recipe(
        4,
        tokens_per_step=1024,
        num_workers=0,
        device="cpu",
        easy_until=0.0,
        long_from=1.0,
        edited_share=0.5,
        kinds=kinds,
    )
    before = model.lm_head.weight.clone()
    train(model, TOKENIZER, recipe)
    assert drawn == set(kinds)
    lines = capsys.readouterr().out
    assert "edited" in lines
    assert "plain" in lines
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", lines)]
    assert len(losses) == 4
    assert torch.isfinite(torch.tensor(losses)).all()
    assert torch.isfinite(model.lm_head.weight).all()
    assert not torch.equal(model.lm_head.weight, before)
