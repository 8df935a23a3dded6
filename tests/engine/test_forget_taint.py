"""FORGET against a plain account of which row was computed from which: verbs in any order, texts that share parts."""

from __future__ import annotations

import random

import pytest

from tests.engine import drawing
from tests.engine.harness import Rig, random_ids

REUSES = drawing.REUSES[:-1]  # all but what takes nothing


class Taint:
    """Of each slot the rows it was computed from, as bits, its own among them."""

    def __init__(self, engine):
        self.engine, self.own, self.deps, self.count = engine, {}, {}, 0
        commit = engine._stepper._commit

        def watched(share, sampled):
            rows = share.request.sequence.rows
            slots = rows.slots.copy()
            n = len(slots)
            for i, s in zip(share.index.tolist(), share.slots.tolist(), strict=True):
                if i < n:
                    slots[i] = s
            acc, upto = 0, 0
            for i, s in zip(share.index.tolist(), share.slots.tolist(), strict=True):
                for j in range(upto, min(i, n)):
                    acc |= self.deps.get(int(slots[j]), 0) if slots[j] >= 0 else 0
                upto = i
                self.own[s] = 1 << self.count
                self.count += 1
                self.deps[s] = acc | self.own[s]
            commit(share, sampled)

        engine._stepper._commit = watched

    def of(self, slots):
        out = 0
        for s in slots.tolist():
            if s >= 0:
                out |= self.own[s]
        return out

    def tainted(self, slots, span):
        return [s for s in slots.tolist() if s >= 0 and self.deps[s] & span]


@pytest.mark.parametrize("ample", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_was_computed_from_a_forgotten_span_is_found(loaded, seed, ample):
    """What the registry has let go, for want of room or by a FORGET, it can't trace: so long are lists held to it."""
    r = random.Random(f"{seed}/{ample}")
    rig = Rig(
        loaded("v2-qlora-dense", layers=2),
        num_slots=20_000 if ample else r.choice([900, 1800]),
        chunk_budget=20_000 if ample else r.choice([250, 1000]),
        check=False,
        ahead=seed % 2 == 0,
    )
    eng, taint, traced = rig.engine, Taint(rig.engine), ample

    def text():
        return [
            *random_ids(r.choice([20, 40, 60]), r.randint(0, 3)),
            *(one for d in r.sample(drawing.DOCS, r.randint(1, 3)) for one in d[: r.choice([len(d), 40])]),
        ]

    for _ in range(30):
        seqs, what = list(eng.sequences), r.random()
        if (what < 0.35 and len(seqs) < 6) or not seqs:
            s = rig.open(text(), reuse=r.choice(REUSES))
            run = rig.compute(s)
            rig.run()
        elif what < 0.5:
            for s in r.sample(seqs, min(2, len(seqs))):
                if r.random() < 0.6 and eng.length(s) < 700:
                    eng.append(s, r.choice(drawing.DOCS))
                if eng.length(s):
                    run = rig.generate(s, 3)
                    if r.random() < 0.2:
                        rig.step()
                        run.request.cancel()
            rig.run()
        elif what < 0.6:
            s = r.choice(seqs)
            n = eng.length(s)
            a = r.randint(0, n)
            b = min(n, a + r.randint(0, 60))
            e = rig.edit(a, b, r.choice([[], random_ids(5, 3)]))
            before = eng.ids(s, a, b)
            eng.splice(s, [e])
            if r.random() < 0.3:  # put back as other rows
                eng.splice(s, [rig.edit(a, a + len(e.ids), before)])
            elif r.random() < 0.5 and n > 5:
                if r.random() < 0.5 and eng.length(s):
                    rig.compute(s)
                    rig.run()
                eng.undo(s, e.edit_id, a, len(e.ids))
        elif what < 0.68:
            eng.fork(r.choice(seqs))
        elif what < 0.76:
            s = r.choice(seqs)
            eng.truncate(s, r.randint(0, eng.length(s)))
        elif what < 0.84:
            eng.close(r.choice(seqs))
        elif what < 0.88:
            eng._admission._evict_idle()
        else:
            s = r.choice(seqs)
            n = eng.length(s)
            if not n:
                continue
            a = r.randint(0, n - 1)
            b = min(n, a + r.randint(1, 20))
            before = eng.sequences[s].rows.slots
            span = taint.of(before[a:b])
            twice = bool(
                set(before[:a].tolist()) & set(before[a:b].tolist()) - {-1}
            )  # it stands in front of itself too
            keys = [key[1] for key in eng.cache.kept.keys(s)]
            eng.splice(s, [rig.edit(a, b, [], forget=True, stale=tuple(keys))])
            after = eng.sequences[s].rows.slots
            assert twice or not traced or not taint.tainted(after, span), "its own list"
            traced = False
            for kept in eng.cache.kept.holding(s):
                assert not taint.tainted(kept, span), "kept"
            for slots in eng.cache.tree.slots():
                assert not taint.tainted(slots, span), "tree"
            for slots in eng.cache.chunks.slots():
                assert not taint.tainted(slots, span), "registry"
        eng.check_integrity()
    rig.close_all()
