"""Content reuse: rows of equal content at another position, against Hugging Face's model over a cache that is put
together in plain torch."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_proto.repair import Repair
from leyline_proto.reuse import Reuse
from leyline_server.cache import fingerprints
from leyline_server.cache.chunks import SINK
from leyline_server.engine.engine import EndReason
from leyline_server.lab.oracle import full_forward, second_latents
from tests.engine.harness import NAMESPACE, Rig, random_ids
from tests.engine.pairs import Pair, worst

TOLERANCE = 5e-4  # other text in front moves logits by hundreds of times that
CONTENT = Reuse(pb.REUSE_CONTENT)
REGISTER = Reuse(pb.REUSE_REGISTER)
HEADER, LONGER, OTHER = random_ids(40, seed=1), random_ids(57, seed=2), random_ids(23, seed=3)
DOCUMENT, SECOND, QUESTION = random_ids(90, seed=4), random_ids(70, seed=5), random_ids(9, seed=6)
SOURCE = [*HEADER, *DOCUMENT, *OTHER, *SECOND, *QUESTION]
AT, SECOND_AT = len(HEADER), len(HEADER) + len(DOCUMENT) + len(OTHER)
MOVED = [*LONGER, *SECOND, *OTHER[:9], *DOCUMENT, *QUESTION[::-1]]
"""Both documents in the other order, behind a longer header."""
SPANS = ((57, 127), (136, 226))


def pairs(loaded: Any, unpatched: Any, variant: str, repair: Repair | None = None, **more: Any) -> tuple[Pair, Pair]:
    """The source, prefilled, and the text that is to find its content."""
    rig, reference = Rig(loaded(variant), **{"num_slots": 2048, **more}), unpatched(variant)
    source = Pair(rig, reference, SOURCE, REGISTER)
    source.prefill()
    moved = Pair(rig, reference, MOVED, Reuse(pb.REUSE_CONTENT, repair or Repair()))
    return source, moved


def hit(source: Pair, moved: Pair) -> None:
    """What the engine takes from the registry, in the oracle: rows are copied and their keys turned."""
    (first, first_end), (second, second_end) = SPANS
    moved.oracle.restore(source.oracle.copy(SECOND_AT, SECOND_AT + len(SECOND)), first, first_end)
    moved.oracle.restore(source.oracle.copy(AT, AT + len(DOCUMENT)), second, second_end)


def test_moved_documents_are_read_where_they_now_stand(loaded, unpatched, variant):
    source, moved = pairs(loaded, unpatched, variant, prefill_chunk=16)
    hit(source, moved)
    report = moved.rig.prefill(moved.sequence)
    moved.oracle.compute()
    assert report.content_spans == SPANS
    assert (report.prefix_hit, report.kept, report.content_hit) == (0, 0, 160)
    assert report.computed == len(MOVED) - 160
    assert report.turned == 160
    assert moved.row_error() < TOLERANCE
    assert moved.error(forced=random_ids(3, seed=7)) < TOLERANCE
    # Nothing was copied: both lists name the same slots.
    there = moved.rig.slots(moved.sequence)
    assert np.array_equal(there[57:127], moved.rig.slots(source.sequence)[SECOND_AT : SECOND_AT + 70])
    moved.rig.close_all()


def test_it_is_approximate_and_says_so(loaded, unpatched, variant):
    _, moved = pairs(loaded, unpatched, variant)
    got = moved.rig.logits(moved.sequence)
    assert worst(got, full_forward(unpatched(variant), MOVED)[-1:]) > 100 * TOLERANCE
    assert moved.rig.engine.exact_upto(moved.sequence) == 57
    # So none of it from there on answers anybody as a prefix, nor as content.
    again = moved.rig.prefill(moved.rig.open(MOVED))
    assert (again.prefix_hit, again.content_hit) == (57, 0)
    registered = {tuple(slots) for slots in moved.rig.engine.cache.chunks.slots()}
    assert not {slot for slots in registered for slot in slots} & set(moved.rig.slots(moved.sequence)[226:].tolist())


def test_an_exact_prefix_comes_first(loaded, unpatched, variant):
    source, _ = pairs(loaded, unpatched, variant)
    longer = [*SOURCE[:150], *LONGER, *DOCUMENT, *QUESTION]
    report = source.rig.prefill(source.rig.open(longer, reuse=CONTENT))
    assert report.prefix_hit == 150
    assert report.content_spans == ((207, 297),)


def test_only_sessions_that_ask_take_or_register(loaded, unpatched, variant):
    source, _ = pairs(loaded, unpatched, variant)
    rig = source.rig
    assert rig.prefill(rig.open(MOVED)).content_hit == 0
    assert rig.prefill(rig.open([7, *MOVED], reuse=REGISTER)).content_hit == 0
    rig.prefill(rig.open([8, *random_ids(100, seed=8)]))
    unseen = [*LONGER, *random_ids(100, seed=8), *QUESTION]
    assert rig.prefill(rig.open(unseen, reuse=CONTENT)).content_hit == 0


def test_another_tenant_and_another_model_get_nothing(loaded, unpatched, variant):
    source, _ = pairs(loaded, unpatched, variant)
    rig = source.rig
    for namespace in (("other", NAMESPACE[1]), (NAMESPACE[0], "other")):
        assert rig.prefill(rig.open(MOVED, namespace, CONTENT)).content_hit == 0
    assert rig.prefill(rig.open(MOVED, reuse=CONTENT)).content_hit == 160


def test_the_first_positions_and_the_last_are_never_hit(loaded, unpatched, variant):
    source, _ = pairs(loaded, unpatched, variant)
    rig = source.rig
    report = rig.prefill(rig.open(DOCUMENT, reuse=CONTENT))
    assert report.content_spans == ((SINK, len(DOCUMENT) - 1),)
    # Nor is what stands in a sink found elsewhere: HEADER's first rows are not registered.
    assert rig.prefill(rig.open([*LONGER, *HEADER, 5], reuse=CONTENT)).content_hit == 0


@pytest.mark.parametrize("first", [1, 7, 75])
def test_the_first_of_each_hit_can_be_computed(loaded, unpatched, variant, first):
    source, moved = pairs(loaded, unpatched, variant, Repair(first=first))
    hit(source, moved)
    for start, end in SPANS:
        moved.oracle.known[start : min(end, start + first)] = False
    report = moved.rig.prefill(moved.sequence)
    moved.oracle.compute()
    assert report.content_spans == tuple((start + first, end) for start, end in SPANS if start + first < end)
    assert moved.error(forced=random_ids(2, seed=7)) < TOLERANCE
    assert moved.row_error() < TOLERANCE


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_the_share_that_deviates_most_can_be_computed(loaded, unpatched, variant, share):
    source, moved = pairs(loaded, unpatched, variant, Repair(share=share))
    hit(source, moved)
    new = second_latents(unpatched(variant), MOVED)
    again = []
    # What deviates is seen over the rows that are there, not over a fresh prefill: two layers of plain torch.
    for start, end in SPANS:
        old = moved.oracle.c_kv[1, start:end]
        deviation = (new[start:end] - old).norm(dim=-1) / old.norm(dim=-1)
        again += (deviation.topk(ceil(round((end - start) * share, 4))).indices + start).tolist()
    report = moved.rig.prefill(moved.sequence)
    assert report.content_hit == 160 - len(again)
    slots = moved.rig.slots(moved.sequence)
    fresh = [i for start, end in SPANS for i in range(start, end) if slots[i] not in moved.rig.slots(source.sequence)]
    assert fresh == sorted(again)
    moved.oracle.known[again] = False
    moved.oracle.compute()
    assert moved.error(forced=random_ids(2, seed=7)) < TOLERANCE


def test_all_computed_is_a_fresh_prefill(loaded, unpatched, variant):
    _, moved = pairs(loaded, unpatched, variant, Repair(share=1.0))
    assert worst(moved.rig.logits(moved.sequence), full_forward(unpatched(variant), MOVED)[-1:]) < TOLERANCE
    assert moved.rig.engine.exact_upto(moved.sequence) == len(MOVED)


def test_what_comes_later_is_found_too(loaded, unpatched, variant):
    """A tool output that a session has read already, in the middle of another session."""
    source, _ = pairs(loaded, unpatched, variant)
    rig, oracle_of = source.rig, unpatched(variant)
    talk = Pair(rig, oracle_of, LONGER, CONTENT)
    assert talk.error(forced=OTHER) < TOLERANCE
    talk.append(DOCUMENT)
    at = len(talk.oracle.ids) - len(DOCUMENT)
    talk.oracle.restore(source.oracle.copy(AT, AT + len(DOCUMENT)), at, at + len(DOCUMENT))
    talk.append(QUESTION)
    assert talk.error(forced=random_ids(3, seed=7)) < TOLERANCE
    assert talk.row_error() < TOLERANCE


def test_an_edit_inside_a_hit_is_an_edit_like_others(loaded, unpatched, variant):
    source, moved = pairs(loaded, unpatched, variant)
    hit(source, moved)
    moved.prefill()
    moved.amortize((150, 160, [3, 4]), (70, 75, []))
    assert moved.error(forced=random_ids(3, seed=7)) < TOLERANCE
    assert moved.row_error() < TOLERANCE
    # The other session's rows are as they were.
    assert source.error(forced=random_ids(3, seed=8)) < TOLERANCE


def test_collisions_change_nothing(loaded, unpatched, variant, monkeypatch):
    """Every id hashes alike, so all fingerprints of all texts are one."""
    monkeypatch.setattr(fingerprints, "numbers", lambda count: np.zeros(count, np.uint64))
    source, moved = pairs(loaded, unpatched, variant)
    report = moved.rig.prefill(moved.sequence)
    for start, end in report.content_spans:
        assert end - start >= fingerprints.SHORTEST
    if report.content_hit:
        rows = source.rig.engine.sequences[moved.sequence].rows
        ids_of = dict(zip(source.rig.slots(source.sequence).tolist(), SOURCE, strict=True))
        index = [i for start, end in report.content_spans for i in range(start, end)]
        assert [ids_of[int(rows.slots[i])] for i in index] == [MOVED[i] for i in index]
    else:
        assert worst(moved.rig.logits(moved.sequence), full_forward(unpatched(variant), MOVED)[-1:]) < TOLERANCE


def test_few_hashes_change_nothing(loaded, unpatched, variant, monkeypatch):
    """Two numbers for all ids: fingerprints of unlike texts meet all the time."""
    monkeypatch.setattr(fingerprints, "numbers", lambda count: np.arange(count, dtype=np.uint64) % 2)
    source, moved = pairs(loaded, unpatched, variant)
    moved.rig.prefill(moved.sequence)
    rows = moved.rig.engine.sequences[moved.sequence].rows
    ids_of = dict(zip(source.rig.slots(source.sequence).tolist(), SOURCE, strict=True))
    borrowed = [i for i, slot in enumerate(rows.slots.tolist()) if slot in ids_of]
    assert [ids_of[int(rows.slots[i])] for i in borrowed] == [MOVED[i] for i in borrowed]


def test_hits_that_would_overlap_leak_nothing(loaded, unpatched, variant):
    """One text has DOCUMENT, another has its end and SECOND: the question is all of it."""
    rig = Rig(loaded(variant), num_slots=2048)
    for text in ([*HEADER, *DOCUMENT, *OTHER], [*LONGER, *DOCUMENT[-14:], *SECOND, *OTHER]):
        rig.prefill(rig.open(text, reuse=REGISTER))
    found = rig.open([*random_ids(35, seed=9), *DOCUMENT, *SECOND, *QUESTION], reuse=CONTENT)
    assert rig.prefill(found).content_hit == len(DOCUMENT) + len(SECOND)
    rig.engine.check_integrity()
    rig.close_all()


@pytest.mark.parametrize("close", [True, False])
def test_forget_takes_it_out_of_the_registry(loaded, unpatched, variant, close):
    """The document and all behind it, also rows that another session reads; what stood before it stays."""
    source, moved = pairs(loaded, unpatched, variant)
    rig = moved.rig
    rig.prefill(moved.sequence)
    (receipt,) = rig.engine.splice(source.sequence, [rig.edit(AT + 10, AT + 20, [], forget=True)])
    assert receipt.held_elsewhere == (moved.sequence,)
    before = rig.slots(source.sequence)[SINK : AT + 10].tolist()
    if close:
        rig.engine.close(moved.sequence)
        rig.engine.close(source.sequence)
    assert np.concatenate(rig.engine.cache.chunks.slots()).tolist() == before
    assert rig.prefill(rig.open([9, *MOVED], reuse=CONTENT)).content_hit == 0


def test_forget_of_a_hit_reaches_what_its_source_computed_behind_it(loaded, unpatched, variant):
    """The source is closed, and the tree holds none of it: only the registry knows what stood behind what."""
    source, moved = pairs(loaded, unpatched, variant)
    rig = moved.rig
    rig.prefill(moved.sequence)
    rig.engine.close(source.sequence)
    rig.engine.cache.release_cached(rig.engine.cache.tree.clear())
    at = SPANS[1][0] + 60  # in the first document of the source: the second one was computed behind it
    rig.engine.splice(moved.sequence, [rig.edit(at, at + 5, [], forget=True)])
    rig.engine.close(moved.sequence)
    assert rig.prefill(rig.open([9, *LONGER, *SECOND, *QUESTION], reuse=CONTENT)).content_hit == 0


@pytest.mark.parametrize("evicted", [False, True])
def test_forget_in_front_of_hits_leaves_them_to_others(loaded, unpatched, variant, evicted):
    """They were computed by another session, from other text."""
    _, moved = pairs(loaded, unpatched, variant)
    rig = moved.rig
    rig.prefill(moved.sequence)
    if evicted:
        assert rig.engine._admission._evict_idle()  # the source
        assert rig.engine._admission._evict_idle()
        assert not (rig.slots(moved.sequence) >= 0).any()
    (receipt,) = rig.engine.splice(moved.sequence, [rig.edit(50, 52, [], forget=True)])
    assert receipt.held_elsewhere == ()
    assert rig.prefill(rig.open([9, *MOVED], reuse=CONTENT)).content_hit == 160


def test_a_forgetting_session_computes_anew(loaded, unpatched, variant):
    """Not even rows of other sessions answer what stands behind a FORGET; what is appended later may be found."""
    _, moved = pairs(loaded, unpatched, variant)
    moved.rig.prefill(moved.sequence)
    moved.rig.engine.splice(moved.sequence, [moved.rig.edit(50, 52, [], forget=True)])
    assert moved.rig.prefill(moved.sequence).content_hit == 0
    text = moved.rig.engine.ids(moved.sequence)
    assert worst(moved.rig.logits(moved.sequence), full_forward(unpatched(variant), text)[-1:]) < TOLERANCE


def test_a_fork_reuses_like_its_origin(loaded, unpatched, variant):
    _, moved = pairs(loaded, unpatched, variant)
    fork = moved.rig.engine.fork(moved.sequence)
    assert moved.rig.prefill(fork).content_hit == 160


def test_a_cancelled_fill_leaks_nothing(loaded, unpatched, variant):
    source, moved = pairs(loaded, unpatched, variant, prefill_chunk=8)
    rig = moved.rig
    run = rig.generate(moved.sequence, 4)
    rig.step()
    rig.step()
    run.request.cancel()
    rig.run()
    assert run.end is EndReason.CANCELLED
    rig.engine.close(source.sequence)
    hit(source, moved)
    rig.engine.check_integrity()
    moved.oracle.compute()
    assert worst(rig.logits(moved.sequence), moved.oracle.logits()) < TOLERANCE
    rig.close_all()


def test_a_source_closed_and_evicted_leaves_readers_their_rows(loaded, unpatched, variant):
    source, moved = pairs(loaded, unpatched, variant, num_slots=512)
    rig = moved.rig
    hit(source, moved)
    moved.prefill()
    rig.engine.close(source.sequence)
    crowd = rig.open(random_ids(500 - rig.engine.stats().in_use, seed=11))
    rig.prefill(crowd)  # everything that caches alone hold had to go
    rig.engine.close(crowd)
    assert moved.error(forced=random_ids(3, seed=7)) < TOLERANCE
    rig.close_all()
