"""Content reuse and FORGET in corners: sinks, gaps, forks, evictions, edits in front, undo, rollback."""

from __future__ import annotations

import numpy as np
import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_proto.reuse import Reuse
from leyline_server.cache.chunks import SINK
from tests.engine.harness import Rig, random_ids

CONTENT, REGISTER = Reuse(pb.REUSE_CONTENT), Reuse(pb.REUSE_REGISTER)
V = "v2-qlora-dense"


@pytest.fixture
def rig(loaded):
    return Rig(loaded(V), num_slots=2048)


def registered(rig, text):
    sequence = rig.open(text, reuse=REGISTER)
    rig.prefill(sequence)
    return sequence


def with_a_gap(rig, more=()):
    """Its document, at [100, 190), was known by content before: its own chunks leave that out."""
    doc = random_ids(90, 4)
    registered(rig, [*random_ids(60, 5), *doc, 7])
    return registered(rig, [*random_ids(100, 6), *doc, *more])


def reading(rig, story):
    """A session that finds the story, at [60, 260), in another's; it is not computed yet."""
    registered(rig, [*random_ids(70, 3), *story, 9])
    return rig.open([*random_ids(60, 8), *story, 5], reuse=CONTENT)


def registered_by_a_fork(rig, own, story):
    """A fork goes on with the story, computes it, and is closed."""
    fork = rig.engine.fork(own)
    rig.engine.append(fork, story)
    rig.prefill(fork)
    rig.engine.close(fork)


def hit_elsewhere(rig, story, seed=3):
    """How much of the story another session finds, behind other text."""
    return rig.prefill(rig.open([*random_ids(50, seed), *story, 5], reuse=CONTENT)).content_hit


def test_forget_in_the_sink_reaches_what_a_fork_registered(rig):
    """The secret stands in the first 32 positions, which are in no chunk."""
    short = registered(rig, random_ids(30, 1))
    story = random_ids(200, 2)
    registered_by_a_fork(rig, short, story)
    rig.engine.splice(short, [rig.edit(10, 20, [], forget=True)])
    assert hit_elsewhere(rig, story) == 0


def test_forget_in_a_gap_reaches_what_a_fork_registered(rig):
    """The secret stands in a document that was known by content before."""
    story = random_ids(200, 2)
    own = with_a_gap(rig)
    registered_by_a_fork(rig, own, story)
    rig.engine.splice(own, [rig.edit(120, 130, [], forget=True)])
    assert hit_elsewhere(rig, story) == 0


def test_forget_reaches_what_was_truncated(rig):
    """As before, in one session."""
    story = random_ids(200, 2)
    own = with_a_gap(rig, story)
    rig.engine.truncate(own, 190)
    rig.engine.splice(own, [rig.edit(120, 130, [], forget=True)])
    assert hit_elsewhere(rig, story) == 0


def test_forget_reaches_behind_a_chunk_that_gave_way(rig):
    """The chunk of the secret was evicted, one behind it is still here."""
    front, secret, story = random_ids(100, 6), random_ids(140, 7), random_ids(200, 2)
    own = registered(rig, [*front, *secret])
    registered_by_a_fork(rig, own, story)
    chunks = rig.engine.cache.chunks
    for chunk in [c for c in chunks._chunks.values() if c.start >= 32 and c.end <= 240]:
        rig.engine.cache.release_cached(chunks._drop([chunk]))  # as the budget does
    rig.engine.check_integrity()
    rig.engine.splice(own, [rig.edit(120, 130, [], forget=True)])
    assert hit_elsewhere(rig, story) == 0


def test_what_stands_behind_a_forget_is_computed_though_the_list_grows(rig):
    story = random_ids(200, 2)
    own = reading(rig, story)
    assert rig.prefill(own).content_hit == 200
    rig.engine.splice(own, [rig.edit(50, 52, [], forget=True)])
    rig.engine.splice(own, [rig.edit(40, 40, random_ids(120, 9))])
    assert rig.prefill(own).content_hit == 0


def test_hits_that_were_cut_and_came_back_stay_for_others(rig):
    story = random_ids(200, 2)
    own = reading(rig, story)
    rig.prefill(own)
    edit = rig.edit(80, 100, [])
    rig.engine.splice(own, [edit])
    rig.logits(own)
    rig.engine.undo(own, edit.edit_id, 80, 0)
    (receipt,) = rig.engine.splice(own, [rig.edit(50, 52, [], forget=True)])
    assert receipt.held_elsewhere == ()
    assert hit_elsewhere(rig, story, seed=13) == 200


def test_hits_that_are_kept_for_undo_stay_for_others(rig):
    story = random_ids(200, 2)
    own = reading(rig, story)
    rig.prefill(own)
    edit = rig.edit(80, 100, [])
    rig.engine.splice(own, [edit])
    (receipt,) = rig.engine.splice(own, [rig.edit(50, 52, [], forget=True, stale=(edit.edit_id,))])
    assert receipt.held_elsewhere == ()
    assert hit_elsewhere(rig, story, seed=13) == 200


def test_borrowed_names_no_slot_of_another_row(loaded):
    rig = Rig(loaded(V), num_slots=700)
    story = random_ids(200, 2)
    source = registered(rig, [*random_ids(70, 3), *story, 9])
    text = [*random_ids(60, 8), *story, *random_ids(20, 9)]
    own = rig.open(text, reuse=CONTENT)
    rig.prefill(own)
    assert rig.engine._admission._evict_idle()
    assert rig.engine._admission._evict_idle()
    rig.engine.close(source)
    rig.engine.cache.clear_caches()
    other = rig.open(text)  # PREFIX: computed whole, into the same slots
    rig.prefill(other)
    report = rig.prefill(own)
    assert report.prefix_hit == len(text) - 1

    # AMORTIZE, a fork keeps the tail, FORGET the edit
    edit = rig.edit(40, 50, [])
    rig.engine.splice(own, [edit])
    fork = rig.engine.fork(own)
    rig.engine.close(other)
    rig.engine.truncate(fork, 220)
    (e2,) = [rig.edit(0, 60, [])]
    rig.engine.splice(fork, [e2])
    for key in rig.engine.cache.kept.keys(fork):
        rig.engine.cache.release_cached(rig.engine.cache.kept.drop(key))
    (receipt,) = rig.engine.splice(own, [rig.edit(40, 40, [], forget=True, forgotten=(edit.edit_id,))])
    assert receipt.held_elsewhere == (fork,)


def test_forget_reaches_what_a_cancelled_call_registered(rig):
    """Append with prefill=true is cancelled: it publishes what it has computed, and is rolled back."""
    story = random_ids(200, 2)
    own = with_a_gap(rig)
    checkpoint = rig.engine.checkpoint(own)
    rig.engine.append(own, [*story, *random_ids(500, 8)])
    run = rig.compute(own)
    for _ in range(6):
        rig.step()
    run.request.cancel()
    rig.run()
    rig.engine.rollback(own, checkpoint)
    rig.engine.splice(own, [rig.edit(120, 130, [], forget=True)])
    assert hit_elsewhere(rig, story) == 0


def test_hits_of_a_call_that_was_rolled_back_stay_for_others(rig):
    story = random_ids(200, 2)
    own = reading(rig, story)
    rig.prefill(own)
    checkpoint = rig.engine.checkpoint(own)
    rig.engine.splice(own, [rig.edit(80, 100, [])])
    rig.prefill(own)
    rig.logits(own)
    rig.engine.rollback(own, checkpoint)
    (receipt,) = rig.engine.splice(own, [rig.edit(50, 52, [], forget=True)])
    assert receipt.held_elsewhere == ()
    assert hit_elsewhere(rig, story, seed=13) == 200


def test_a_rolled_back_forget_leaves_reuse_as_it_was(rig):
    story = random_ids(200, 2)
    own = reading(rig, story)
    checkpoint = rig.engine.checkpoint(own)
    rig.engine.splice(own, [rig.edit(50, 52, [], forget=True)])
    rig.engine.rollback(own, checkpoint)
    assert rig.prefill(own).content_hit == 200


def test_a_registry_without_budget_holds_nothing(loaded):
    rig = Rig(loaded(V), num_slots=2048, chunk_budget=0)
    for seed in range(3):
        rig.prefill(rig.open(random_ids(200, seed), reuse=REGISTER))
    assert not rig.engine.cache.chunks.slots()


@pytest.fixture
def moved(rig):
    """The source is closed; its DOCUMENT stood in front of its SECOND."""
    from tests.engine.test_content_reuse import MOVED, SOURCE

    source = registered(rig, SOURCE)
    rig.engine.close(source)
    found = rig.open(MOVED, reuse=CONTENT)
    rig.prefill(found)
    return found


def test_forget_of_a_hit_leaves_nothing_in_the_list_that_was_computed_from_it(rig, moved):
    before = rig.slots(moved)
    rig.engine.splice(moved, [rig.edit(146, 156, [], forget=True)])  # in DOCUMENT, from which SECOND was computed
    assert not np.isin(rig.slots(moved)[57:127], before[57:127]).any()


def test_forget_of_a_hit_lists_who_reads_what_was_computed_from_it(rig, moved):
    from tests.engine.test_content_reuse import QUESTION, SECOND

    reader = rig.open([*random_ids(50, 3), *SECOND, *QUESTION], reuse=CONTENT)
    assert rig.prefill(reader).content_hit >= 70
    (receipt,) = rig.engine.splice(moved, [rig.edit(146, 156, [], forget=True)])
    assert receipt.held_elsewhere == (reader,)


def test_a_session_that_stays_open_is_a_pin(loaded):
    rig = Rig(loaded(V), num_slots=2048, chunk_budget=300)
    story = random_ids(200, 2)
    registered(rig, [*random_ids(60, 8), *story, 5])
    other = registered(rig, random_ids(300, 9))
    rig.engine.close(other)
    assert rig.engine.stats().free > 1000
    assert hit_elsewhere(rig, story) == 200


def crowd_out(rig, keeps=0):
    """Another session fills the pool once: what no session holds goes, but for so many rows."""
    crowd = rig.open(random_ids(rig.engine.stats().free + rig.engine.stats().cached - keeps, 11))
    rig.prefill(crowd)
    rig.engine.close(crowd)


def test_text_that_was_cut_and_put_back_stands_in_the_midst_of_a_chunk(loaded):
    """Its new rows are a chunk of their own, below the one around them: a FORGET returns, and reaches both."""
    rig, text = Rig(loaded(V), num_slots=1000), random_ids(400, 1)
    own = registered(rig, text)
    other = rig.open([*text, *random_ids(2, 2)])
    rig.prefill(other)
    rig.engine.close(other)
    crowd_out(rig, keeps=1)  # the tree has lost the text
    rig.engine.splice(own, [rig.edit(300, 340, [])])
    rig.engine.splice(own, [rig.edit(300, 300, text[300:340])])
    assert rig.prefill(own).computed == 40
    assert hit_elsewhere(rig, text[280:360]) == 80
    rig.engine.splice(own, [rig.edit(310, 320, [], forget=True)])
    assert hit_elsewhere(rig, text[300:]) == 0
    assert hit_elsewhere(rig, text[100:200], seed=4) == 100


def test_a_gap_that_is_filled_again_and_again_is_one_gap(loaded):
    """The end of a document is held, its front goes and comes back."""
    rig, text = Rig(loaded(V), num_slots=1000), random_ids(400, 1)
    own = registered(rig, text)
    rig.prefill(rig.open([*random_ids(50, 2), *text[216:], 7], reuse=CONTENT))
    rig.engine.close(own)
    for _ in range(3):
        crowd_out(rig)
        (held,) = [chunk for chunk in rig.engine.cache.chunks._chunks.values() if chunk.start == 216]
        assert sum(map(len, held.gap)) == 216
        again = rig.open([*text, 5], reuse=CONTENT)
        rig.prefill(again)
        rig.engine.close(again)


def test_a_hit_is_a_use(loaded):
    rig = Rig(loaded(V), num_slots=4096, chunk_budget=500)
    first, second, third = stories = [random_ids(200, seed) for seed in (2, 3, 4)]
    for number, story in enumerate(stories):
        if story is third:
            assert hit_elsewhere(rig, first) == 200
            rig.engine.close(max(rig.engine.sequences))
        own = registered(rig, [*random_ids(60, 8 + number), *story, 5])
        rig.engine.close(own)
    assert hit_elsewhere(rig, first) == 200
    assert hit_elsewhere(rig, second) < 200


def test_what_stands_in_front_of_a_forgotten_span_is_found_as_before(rig):
    """In its chunk too, whose other rows go."""
    text = random_ids(230, 1)
    own = registered(rig, text)
    assert hit_elsewhere(rig, text[SINK:]) == 198
    rig.engine.splice(own, [rig.edit(100, 110, [], forget=True)])
    assert hit_elsewhere(rig, text[SINK:100], seed=4) == 68
    assert hit_elsewhere(rig, text[110:], seed=5) == 0
    rig.prefill(own)
    assert hit_elsewhere(rig, [*text[SINK:100], *text[110:]], seed=6) == 188, "as one stretch"
