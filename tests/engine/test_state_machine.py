"""Any order of operations and failures: the books are right after each, and content equals a plain list's."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leyline_proto import leyline_pb2 as pb
from leyline_proto.refusal import Refusal
from leyline_proto.repair import NO_REPAIR, Repair
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.cache import chunks, fingerprints
from leyline_server.engine import local
from leyline_server.engine import sequence as sequence_module
from leyline_server.engine.engine import GenerateParams, RowEdit
from leyline_server.lab.oracle import Oracle
from tests.engine.harness import Rig
from tests.engine.pairs import Pair
from tests.engine.plain import Model, ToldRun, failing, scarce_slots

NUM_SLOTS, CHUNK, MAX_QUEUE = 40, 5, 2
ID = st.integers(2, 4)  # few different ones, so that texts share prefixes
SOME_IDS = st.lists(ID, min_size=1, max_size=8)
R_IDS = st.lists(ID, max_size=5)
WHICH = st.integers(0, 11)  # an index, modulo what there is
REPAIR = st.sampled_from([NO_REPAIR, Repair(first=2), Repair(share=0.3), Repair(share=0.6), Repair(share=1.0)])
REUSE = st.sampled_from(
    [
        PREFIX,
        Reuse(pb.REUSE_REGISTER),
        Reuse(pb.REUSE_CONTENT),
        Reuse(pb.REUSE_CONTENT, Repair(first=2)),
        Reuse(pb.REUSE_CONTENT, Repair(share=0.5)),
    ]
)
CUT = st.tuples(st.integers(0, 20), st.integers(0, 4), R_IDS)


class EngineMachine(RuleBasedStateMachine):
    loaded: ClassVar[Any]
    reference: ClassVar[Any]
    content: ClassVar[bool] = False

    @initialize(
        texts=st.lists(st.lists(ID, min_size=8, max_size=14), min_size=3, max_size=3),
        ahead=st.booleans(),
        budget=st.sampled_from([9, NUM_SLOTS]),
        reuse=REUSE,
    )
    def start(self, texts, ahead, budget, reuse) -> None:
        self.rig = Rig(self.loaded, NUM_SLOTS, CHUNK, MAX_QUEUE, ahead=ahead, max_running=3, chunk_budget=budget)
        self.engine = self.rig.engine
        self.models: dict[int, Model] = {}
        for text, tenant in zip(texts, "aab", strict=True):
            self.open(text, tenant, Reuse(pb.REUSE_REGISTER))
            self.rig.prefill(next(reversed(self.models)))
        if self.content:
            self.open([2, *texts[0]], "a", reuse)
            self.rig.prefill(next(reversed(self.models)))

    # ------------------------------------------------------------ choosing

    def _pick(self, which: int, busy: bool = False) -> int | None:
        found = [s for s, model in self.models.items() if (model.run is not None) == busy]
        return found[which % len(found)] if found else None

    def _span(self, length: int, where: int, size: int) -> tuple[int, int]:
        start = where % (length + 1)
        return start, min(length, start + size)

    def _pop_edit(self, model: Model, which: int) -> tuple[str, int, int, list[int]]:
        return model.edits.pop(which % len(model.edits))

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.models) < 5)
    @rule(ids=SOME_IDS, tenant=st.sampled_from("ab"), reuse=REUSE)
    def open(self, ids, tenant, reuse):
        reuse = reuse if self.content else PREFIX
        sequence = self.rig.open(ids, (tenant, "digest"), reuse)
        self.models[sequence] = Model(list(ids), honest=not reuse.takes)

    @precondition(lambda self: self.content and len(self.models) < 5)
    @rule(of=WHICH, front=st.lists(ID, max_size=3), reuse=REUSE, max_tokens=st.sampled_from([0, 3]))
    def open_the_same_elsewhere(self, of, front, reuse, max_tokens):
        """Most of what a session says, behind something else, and its request."""
        if (sequence := self._pick(of)) is not None:
            self.open([*front, *self.models[sequence].ids[1:]], "a", reuse)
            self.request(sum(model.run is None for model in self.models.values()) - 1, max_tokens, [])

    @rule(session=WHICH, ids=SOME_IDS)
    def append(self, session, ids):
        if (sequence := self._pick(session)) is not None:
            self.engine.append(sequence, ids)
            self.models[sequence].ids += ids

    @rule(first=WHICH, max_tokens=st.sampled_from([0, 1, 4]), count=st.integers(2, 3))
    def request_from_several(self, first, max_tokens, count):
        for which in range(first, first + count):
            self.request(which, max_tokens, [])

    @rule(session=WHICH, max_tokens=st.sampled_from([0, 1, 3, 6]), force=st.lists(ID, max_size=6))
    def request(self, session, max_tokens, force):
        """A compute, or a Generate of 1 to 6 tokens."""
        sequence = self._pick(session)
        if sequence is None or not self.models[sequence].ids:
            return
        run = ToldRun(self.models[sequence])
        refused = ""
        try:
            if max_tokens:
                params = GenerateParams(max_tokens, force_ids=tuple(force))
                run.request = self.engine.generate(sequence, params, run)
            else:
                run.request = self.engine.compute(sequence, run)
            self.models[sequence].run = run
        except Refusal as refusal:
            refused = refusal.reason
        can_never_fit = len(self.models[sequence].ids) + max_tokens + 1 > NUM_SLOTS
        assert refused != "POOL_EXCEEDED" or can_never_fit
        assert refused != "QUEUE_FULL" or self.engine.stats().queued >= MAX_QUEUE
        assert refused in ("", "POOL_EXCEEDED", "QUEUE_FULL")

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(session=WHICH)
    def cancel(self, session):
        if (sequence := self._pick(session, busy=True)) is not None:
            self.models[sequence].run.request.cancel()

    @rule(layer=st.integers(0, 1), times=st.integers(1, 2))
    def step_fails_in_a_layer(self, layer, times):
        """The first forwards of a step raise; with several members the packed one, and then perhaps one of them."""
        with failing(self.loaded.model.model.layers[layer].mlp, times):
            self.engine.step()

    @rule(after=st.integers(0, 2))
    def step_runs_out_of_slots(self, after):
        with scarce_slots(after):
            self.engine.step()

    @rule(session=WHICH, cuts=st.lists(CUT, min_size=1, max_size=3), repair=REPAIR)
    def amortize(self, session, cuts, repair):
        self._edit(session, cuts, forget=False, repair=repair)

    @rule(session=WHICH, cut=CUT)
    def forget(self, session, cut):
        self._edit(session, [cut], forget=True)

    def _edit(self, session, cuts, forget, repair=NO_REPAIR):
        sequence = self._pick(session)
        if sequence is None:
            return
        model, edits, upto = self.models[sequence], [], 0
        spans = [(*self._span(len(model.ids), where, size), ids) for where, size, ids in cuts]
        for start, end, ids in sorted(spans):
            if start >= upto and not (edits and start == end == upto):
                edits.append(self.rig.edit(start, end, ids, forget=forget, repair=repair))
                upto = end
        in_use = self.engine.stats().in_use
        receipts = self.engine.splice(sequence, edits)
        assert sum(receipt.freed for receipt in receipts) == in_use - self.engine.stats().in_use
        rows = self.engine.sequences[sequence].rows
        assert {receipt.to_compute for receipt in receipts} <= {rows.num_pending + rows.num_to_repair}
        model.splice([(e.start, e.end, list(e.ids), None if forget else e.edit_id) for e in edits])

    @rule(session=WHICH, which=WHICH)
    def forget_by_edit_id(self, session, which):
        sequence = self._pick(session)
        if sequence is None:
            return
        model = self.models[sequence]
        if not model.edits:
            self._edit_one(sequence, (which, 3, [2]), forget=False)
        edit_id, at, _, _ = self._pop_edit(model, which)
        later = tuple(other for other, where, _, _ in model.edits if where >= at)
        forget = RowEdit(at, at, (), "", forget=True, forgotten=(edit_id,), stale=later)
        (receipt,) = self.engine.splice(sequence, [forget])
        assert receipt.kept == 0

    @rule(session=WHICH, which=WHICH)
    def undo(self, session, which):
        sequence = self._pick(session)
        if sequence is None:
            return
        model = self.models[sequence]
        if not model.edits:
            self._edit_one(sequence, (which, 3, [2]), forget=False)
        edit_id, at, inserted, was = self._pop_edit(model, which)
        assert self.engine.undo(sequence, edit_id, at, inserted).restored == len(was)
        model.splice([(at, at + inserted, was, None)])

    @rule(session=WHICH, back=st.booleans(), cut=CUT, forget=st.booleans())
    def checkpoint(self, session, back, cut, forget):
        """An edit between a checkpoint and its end, either way."""
        sequence = self._pick(session)
        if sequence is None:
            return
        model = self.models[sequence]
        before = list(model.ids), list(model.edits)
        checkpoint = self.engine.checkpoint(sequence)
        self._edit_one(sequence, cut, forget)
        if back:
            self.engine.rollback(sequence, checkpoint)
            model.ids, model.edits = before
        else:
            self.engine.discard(checkpoint)

    def _edit_one(self, sequence, cut, forget):
        where, size, ids = cut
        start, end = self._span(len(self.models[sequence].ids), where, size)
        edit = self.rig.edit(start, end, ids, forget=forget)
        self.engine.splice(sequence, [edit])
        self.models[sequence].splice([(start, end, list(ids), None if forget else edit.edit_id)])

    @rule()
    def run_to_the_end(self):
        self.rig.run()
        assert all(model.run is None for model in self.models.values()), "a request never ended"

    @precondition(lambda self: len(self.models) < 5)
    @rule(session=WHICH, busy=st.booleans())
    def fork(self, session, busy):
        if (sequence := self._pick(session, busy)) is not None:
            model = self.models[sequence]
            self.models[self.engine.fork(sequence)] = Model(list(model.ids), list(model.edits), honest=model.honest)

    @rule(session=WHICH, drop=st.integers(1, 3))
    def truncate(self, session, drop):
        if (sequence := self._pick(session)) is not None:
            model = self.models[sequence]
            length = max(0, len(model.ids) - drop)
            self.engine.truncate(sequence, length)
            model.ids = model.ids[:length]
            model.edits = [edit for edit in model.edits if edit[1] + edit[2] <= length]

    @precondition(lambda self: len(self.models) > 3)
    @rule(session=WHICH)
    def close(self, session):
        if (sequence := self._pick(session)) is not None:
            in_use = self.engine.stats().in_use
            assert self.engine.close(sequence) == in_use - self.engine.stats().in_use
            del self.models[sequence]

    # ------------------------------------------------------------ what always holds

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        for sequence, model in self.models.items():
            assert self.engine.ids(sequence) == model.ids
            computed = len(model.ids) - self.engine.num_pending(sequence)
            assert self.engine.exact_upto(sequence) == computed or not model.honest

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for i, model in enumerate(self.models.values()):
            if model.run is not None and i % 2:
                model.run.request.cancel()
        self.run_to_the_end()
        self.books_are_right()
        for sequence in self.models:
            self._exact_rows_are_honest(sequence)
        self.rig.close_all()

    def _exact_rows_are_honest(self, sequence):
        """Below exact_upto every row of every layer is what Hugging Face computes for this text."""
        upto = self.engine.exact_upto(sequence)
        if upto:
            self.engine.truncate(sequence, upto)
            honest = Pair.__new__(Pair)
            honest.rig, honest.sequence, honest.oracle = self.rig, sequence, Oracle(self.reference)
            honest.oracle.append(self.engine.ids(sequence))
            honest.oracle.compute()
            assert honest.row_error() < 1e-3


@pytest.fixture
def short_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three equal ids are a hit, so that texts of some ten have many; the numbers are always the same."""
    numbers = np.random.Philox(key=1).random_raw(1 << 10)
    monkeypatch.setattr(fingerprints, "numbers", lambda count: numbers)
    for module in (fingerprints, chunks):
        monkeypatch.setattr(module, "GRAM", 2)
        monkeypatch.setattr(module, "SHORTEST", 3)
    monkeypatch.setattr(fingerprints, "WINDOW", 2)
    monkeypatch.setattr(chunks, "_CHUNK", 4)
    for module in (chunks, local, sequence_module):
        monkeypatch.setattr(module, "SINK", 2)


@pytest.mark.parametrize("content", [False, True])
def test_any_order_of_operations_and_failures(loaded, checkpoint, content, short_fingerprints):
    from transformers import AutoModelForCausalLM

    class Machine(EngineMachine):
        pass

    Machine.content = content
    Machine.loaded = loaded("v2-qlora-dense", layers=2)
    Machine.reference = AutoModelForCausalLM.from_pretrained(checkpoint("v2-qlora-dense", 2)).eval()
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=50, phases=[Phase.generate])
    )
