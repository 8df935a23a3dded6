"""Random texts from shared documents, with every verb; reports and books are checked."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.engine.drawing import DOCS, REUSES
from tests.engine.harness import Rig, random_ids


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("budget", [0, 150, 1000])
def test_fuzz(loaded, seed, budget):
    r = random.Random(seed * 7 + budget)
    rig = Rig(
        loaded("v2-qlora-dense", layers=2),
        num_slots=900,
        prefill_chunk=r.choice([16, 64]),
        chunk_budget=budget,
        ahead=r.random() < 0.5,
    )
    eng = rig.engine
    edits = {}

    def text():
        return [
            *random_ids(r.randint(5, 60), r.randint(0, 5)),
            *(one for d in r.sample(DOCS, r.randint(1, 3)) for one in d[: r.choice([len(d), 40])]),
        ]

    def go(seqs):
        runs = []
        for s in seqs:
            if not eng.length(s):
                continue
            runs.append((s, rig.compute(s) if r.random() < 0.4 else rig.generate(s, r.randint(1, 4))))
        for _ in range(r.choice([0, 1, 2])):
            rig.step()
        if runs and r.random() < 0.2:
            runs[0][1].request.cancel()
        rig.run()
        for _, run in runs:
            if run.report is None:
                continue
            rep, n = run.report, run.request.length
            assert rep.prefix_hit + rep.content_hit + rep.kept + rep.computed == n
            assert rep.content_hit == sum(b - a for a, b in rep.content_spans)
            assert all(a < b for a, b in rep.content_spans)
            assert all(b < c for (_, b), (c, _) in pairwise(rep.content_spans))
            assert min([rep.computed, rep.kept]) >= 0
            assert not rep.content_spans or rep.content_spans[0][0] >= 32

    for _ in range(25):
        what = r.random()
        seqs = list(eng.sequences)
        if what < 0.3 and len(seqs) < 5:
            s = rig.open(text(), ("ab"[r.random() < 0.2], "d"), r.choice(REUSES))
            edits[s] = []
            go([s])
        elif not seqs:
            continue
        elif what < 0.5:
            go(r.sample(seqs, r.randint(1, len(seqs))))
        elif what < 0.7:
            s = r.choice(seqs)
            n = eng.length(s)
            a = r.randint(0, n)
            b = min(n, a + r.randint(0, 30))
            e = rig.edit(a, b, r.choice([[], random_ids(5, 3), DOCS[1]]), forget=r.random() < 0.4)
            before = eng.ids(s, a, b)
            if not e.forget and r.random() < 0.5:
                eng.splice(s, [e])
                eng.undo(s, e.edit_id, a, len(e.ids))
            else:
                eng.splice(s, [e])
                if r.random() < 0.4:  # put back as other rows
                    eng.splice(s, [rig.edit(a, a + len(e.ids), before)])
        elif what < 0.78:
            f = eng.fork(r.choice(seqs))
            edits[f] = []
        elif what < 0.86:
            s = r.choice(seqs)
            eng.truncate(s, r.randint(0, eng.length(s)))
        elif what < 0.92:
            eng.close(r.choice(seqs))
        else:
            s = r.choice(seqs)
            c = eng.checkpoint(s)
            eng.append(s, random_ids(20, 5))
            go([s])
            if r.random() < 0.7:
                eng.rollback(s, c)
            else:
                eng.discard(c)
        eng.check_integrity()
        for st in eng.sequences.values():
            assert st.rows.registered_upto <= len(st.rows)
    rig.close_all()
