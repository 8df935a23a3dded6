"""When a text is there for others: after its first token, which does not wait for that, and before its last."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.harness import NAMESPACE, Rig, Run, random_ids

TEXTS = [random_ids(100, seed=1), random_ids(90, seed=2)]


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def rig(loaded, request):
    return Rig(loaded("v2-qlora-dense"), num_slots=2048, prefill_chunk=256, ahead=request.param)


def in_tree(rig):
    """How much of each text is in the prefix tree."""
    cache = rig.engine.cache
    return [len(cache.tree.match(NAMESPACE, np.asarray(ids, np.int32), cache.tick())) for ids in TEXTS]


def test_first_tokens_are_told_before_any_text_is_published(rig, monkeypatch):
    told, token = [], Run.token

    def watched(run, token_id):
        told.append((len(run.tokens), in_tree(rig)))
        return token(run, token_id)

    monkeypatch.setattr(Run, "token", watched)
    for ids in TEXTS:
        rig.generate(rig.open(ids), 4)
    rig.run()
    assert told[:2] == [(0, [0, 0])] * 2
    assert told[2:4] == [(1, [100, 90])] * 2


def test_a_text_is_a_prefix_while_its_answer_is_generated(rig):
    run = rig.generate(rig.open(TEXTS[0]), 64)
    while len(run.tokens) < 2:
        rig.step()
    other = rig.compute(rig.open([*TEXTS[0], 5]))
    while other.report is None:
        rig.step()
    assert other.report.prefix_hit == 100
    assert len(run.tokens) < 64
    rig.run()
