"""How much a list takes of what is found: all in one pass, or nothing where too little is, so that it stays exact."""

from __future__ import annotations

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_proto.repair import Repair
from leyline_proto.reuse import Reuse
from leyline_server.cache.chunks import SINK
from tests.engine.harness import Rig, random_ids

CONTENT, REGISTER = Reuse(pb.REUSE_CONTENT), Reuse(pb.REUSE_REGISTER)
DOCUMENT = random_ids(160, seed=1)
SOURCE = [*random_ids(40, seed=2), *DOCUMENT, *random_ids(9, seed=3)]
MOVED = [*random_ids(66, seed=4), *DOCUMENT, *random_ids(9, seed=5)]  # 68.1 % of it are the document


def least(share, repair=None):
    return Reuse(pb.REUSE_CONTENT, repair or Repair(), share)


@pytest.fixture
def rig(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=2048, prefill_chunk=128)
    rig.prefill(rig.open(SOURCE, reuse=REGISTER))
    return rig


def test_all_holes_are_computed_in_one_pass(rig):
    before = rig.engine.stats().steps
    report = rig.prefill(rig.open(MOVED, reuse=CONTENT))
    assert (report.content_spans, report.computed) == (((66, 226),), 75)
    assert rig.engine.stats().steps == before + 1


def test_too_few_hits_are_left_and_the_text_is_computed_whole_and_found(rig):
    few = rig.open(MOVED, reuse=least(0.69))
    report = rig.prefill(few)
    assert (report.content_hit, report.computed) == (0, 235)
    assert rig.engine.exact_upto(few) == 235
    other = rig.open([*random_ids(40, seed=6), *MOVED[SINK:], 5], reuse=CONTENT)
    assert rig.prefill(other).content_spans == ((40, 40 + 235 - SINK),), "and what was new in it"


def test_hits_that_cover_enough_are_taken(rig):
    assert rig.prefill(rig.open(MOVED, reuse=least(0.68))).content_hit == 160


@pytest.mark.parametrize("repair", [Repair(first=16), Repair(share=0.1)], ids=str)
@pytest.mark.parametrize(("share", "found"), [(0.62, 0), (0.61, 144)])
def test_what_a_repair_has_computed_saves_nothing(rig, share, found, repair):
    """16 of 160: the hit saves 61.3 %."""
    assert rig.prefill(rig.open(MOVED, reuse=least(share, repair))).content_hit == found


def test_the_share_is_of_what_would_be_computed(rig):
    """An exact prefix is none of it: the document is 160 of 229 there, of 418 in all."""
    text = [*SOURCE[:189], *random_ids(60, seed=7), *DOCUMENT, *random_ids(9, seed=8)]
    report = rig.prefill(rig.open(text, reuse=least(0.69)))
    assert (report.prefix_hit, report.content_hit) == (189, 160)


def test_what_is_exact_is_taken_however_little(rig):
    """The text's own rows, which the tree has let go: taking them leaves all exact."""
    rig.engine.cache.release_cached(rig.engine.cache.tree.clear())
    sequence = rig.open([*SOURCE, *random_ids(500, seed=8)], reuse=least(0.75))
    assert rig.prefill(sequence).content_hit == len(SOURCE) - SINK
    assert rig.engine.exact_upto(sequence) == len(SOURCE) + 500


def test_what_is_approximate_already_takes_every_hit(rig):
    """Nothing can be lost any more: its text is computed over hits, whatever it leaves."""
    new = random_ids(100, seed=9)
    for text, found in ((MOVED, 60), (SOURCE, 0)):
        sequence = rig.open(text, reuse=least(0.68))
        rig.prefill(sequence)
        rig.engine.append(sequence, [*new, *DOCUMENT[:60], *random_ids(9, seed=10)])
        assert rig.prefill(sequence).content_hit == found


@pytest.mark.parametrize("replacement", [[], [3, 4]], ids=str)
def test_what_stands_behind_an_edit_takes_every_hit(rig, replacement):
    """What an AMORTIZE left in place is not exact any more, whether or not something in front of it waits."""
    sequence = rig.open(random_ids(120, seed=11), reuse=least(0.68))
    rig.prefill(sequence)
    rig.engine.splice(sequence, [rig.edit(50, 60, replacement)])
    rig.engine.append(sequence, [*DOCUMENT[:60], *random_ids(100, seed=12)])
    assert rig.prefill(sequence).content_hit == 60
