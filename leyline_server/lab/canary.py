"""The canary: a minute's self-test of a loaded model, before it may AMORTIZE for anybody.

Three questions: are keys turned as the model itself would have rotated them; is an AMORTIZE what Hugging Face's own
attention makes of a cache edited in plain torch, on the modules that are served; and does a session that was edited
where it doesn't matter still answer as the unedited one. Owns the bounds and the verdict; who refuses what is the
server's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from leyline_kernels import gather
from leyline_proto.refusal import Refusal
from leyline_server.engine.engine import RowEdit, SequenceId
from leyline_server.lab.arms import F, L, R
from leyline_server.lab.following import answers, choose_stem
from leyline_server.lab.laboratory import Lab, LabError, Question
from leyline_server.lab.oracle import Oracle
from leyline_server.lab.recording import divergence
from leyline_server.lab.scenes import make_scene, text
from leyline_server.model.attention import detached

PROBES: Final = 24
PROBED: Final = "untouched"
TEXT: Final = 240  # tokens
MOVED: Final = 137  # positions
CUTS: Final = ((60, 140, 7), (30, 33, 90))  # [start, end) and the length of R: what follows moves back, and forward
FORCED: Final = 8  # tokens at the end of the text whose logits are compared
ROTATION_BOUND: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
ORACLE_BOUND: Final = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
UNEDITED_BOUND: Final = {torch.float32: 1e-4, torch.bfloat16: 1.0}  # in bf16 a model of sharp attention differs so much
NOISE_BOUND: Final = 4  # times what an unedited text differs by, where that is more than ORACLE_BOUND


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What the three questions found.

    rotation_error: relative, of first-layer keys. oracle_kl: nats, the largest of the compared tokens. unedited_kl:
    the same where nothing was edited, which tells the rounding of two ways of computing from what the edit does.
    agreement: share of `probes`, those that the model answers unedited, in which AMORTIZE begins the answer alike; None
    where there are too few, or the chat format can't say them: `skipped` says why. failures: what is out of bounds,
    with figure and bound.
    """

    rotation_error: float
    oracle_kl: float
    unedited_kl: float
    agreement: float | None
    probes: int
    threshold: float
    skipped: str
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def run(lab: Lab, threshold: float, probes: int = PROBES) -> CanaryReport:
    """Asks the three questions. `threshold`: the least agreement. Everything that it computed is gone afterwards.

    Raises LabError, and a Refusal where the server's bounds are too small for it.
    """
    dtype = lab.model.dtype
    with lab.bench():
        ids = lab.format.encode(text(0, TEXT))[:TEXT]
        rotation, oracle, unedited = _rotation_error(lab, ids), _oracle_kl(lab, ids), _unedited_kl(lab, ids)
        agreement, answered, skipped = _agreement(lab, probes)
    failures = []
    hf = "Hugging Face's attention by a KL of"
    for what, figure, bound in (
        ("keys are turned with a relative error of", rotation, ROTATION_BOUND[dtype]),
        (f"AMORTIZE differs from {hf}", oracle, max(ORACLE_BOUND[dtype], NOISE_BOUND * unedited)),
        (f"an unedited text differs from {hf}", unedited, UNEDITED_BOUND[dtype]),
    ):
        if not figure <= bound:
            failures.append(f"{what} {figure:.2g}, above {bound:g}")
    if agreement is not None and agreement < threshold:
        told = f"AMORTIZE and the unedited session begin alike in {agreement:.0%} of {answered} probes"
        failures.append(f"{told}, below {threshold:.0%}")
    return CanaryReport(rotation, oracle, unedited, agreement, answered, threshold, skipped, tuple(failures))


def _rotation_error(lab: Lab, ids: list[int]) -> float:
    """First-layer keys depend on token and position alone: those of a text, turned as attention turns them, against
    those that the model itself computes so much further on."""
    pool, own = lab.engine.cache.pool, ids[MOVED:]
    here, there = lab.open(own), lab.open(ids)
    lab.prefill(here, there)
    slots, moved = _slots(lab, here), _slots(lab, there)[MOVED:]
    by = torch.full((len(own),), MOVED, dtype=torch.int32, device=slots.device)
    turned = gather(pool.c_kv[0], pool.k_pe[0], slots.int(), by, lab.model.rotary.inv_freq, lab.layout)[1].float()
    want = pool.k_pe[0, moved].float()
    return float((turned - want).norm() / want.norm())


def _oracle_kl(lab: Lab, ids: list[int]) -> float:
    """AMORTIZEs, and the tokens behind them, in the engine and by Hugging Face's attention."""
    return max(_kl(lab, ids, cut) for cut in CUTS)


def _unedited_kl(lab: Lab, ids: list[int]) -> float:
    """The same text without an edit."""
    return _kl(lab, ids, None)


def _kl(lab: Lab, ids: list[int], cut: tuple[int, int, int] | None) -> float:
    """Of the text's last tokens the largest."""
    front, forced = ids[:-FORCED], ids[-FORCED:]
    sequence = lab.open(front)
    lab.prefill(sequence)
    edit = (cut[0], cut[1], tuple(ids[: cut[2]])) if cut else None
    if edit:
        lab.splice(sequence, RowEdit(*edit, lab.edit_id()))
    (asked,) = lab.ask([Question(sequence, forced=tuple(forced))])
    with detached(lab.model.model):
        oracle = Oracle(lab.model.model)
        oracle.append(front)
        oracle.compute()
        if edit:
            oracle.amortize(edit)
        want = oracle.logits(forced)
    return max(divergence(want[:, : asked.logits.shape[1]], asked.logits))


def _agreement(lab: Lab, probes: int) -> tuple[float | None, int, str]:
    """The share, of how many, and why there is none."""
    same = answered = 0
    try:
        stem = choose_stem(lab)
    except LabError as error:
        return None, 0, str(error)
    except Refusal as refusal:
        if refusal.reason != "NOT_SUPPORTED":
            raise
        return None, 0, refusal.message
    for seed in range(probes):
        result = answers(lab, make_scene(PROBED, seed), stem, (F, R, L))
        if result.answered:
            answered += 1
            same += result.answers[F.name].first == result.answers[L.name].first
        lab.clear()
    if 2 * answered < probes:
        return None, answered, f"the model answers {answered} of {probes} probes unedited"
    return same / answered, answered, ""


def _slots(lab: Lab, sequence: SequenceId) -> torch.Tensor:
    return lab.on_device(lab.engine.sequences[sequence].rows.slots)
