"""Steps that are launched before the ones in front of them are read: the same tokens, and nothing kept by mistake."""

from __future__ import annotations

import pytest

from leyline_server.engine.engine import EndReason
from leyline_server.lab.oracle import full_forward
from leyline_server.sampling import SamplingParams
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import Pair, worst
from tests.engine.test_scheduling import POISON, poisoned

TOLERANCE = 1e-4


@pytest.fixture
def ahead(loaded):
    return Rig(loaded("v2-qlora-dense"), prefill_chunk=16, ahead=True)


def test_logits_of_edits_equal_the_oracle(loaded, unpatched, variant):
    pair = Pair(Rig(loaded(variant), prefill_chunk=16, ahead=True), unpatched(variant), random_ids(60))
    pair.prefill()
    pair.amortize((10, 18, random_ids(2, seed=1)), (40, 40, random_ids(11, seed=2)))
    pair.append(random_ids(25, seed=3))
    assert pair.error(random_ids(5, seed=4)) < TOLERANCE
    assert pair.error() < TOLERANCE  # free: each entry's id comes from the step in front of it, on the device
    pair.forget(20, 30, random_ids(3, seed=5))
    assert pair.error(random_ids(4, seed=6)) < TOLERANCE


def test_the_same_tokens_as_one_step_at_a_time(loaded, ahead):
    plain = Rig(loaded("v2-qlora-dense"), prefill_chunk=16)
    runs = []
    for rig in (ahead, plain):
        runs.append([])
        for i, temperature in enumerate((0.0, 1.0, 0.0, 0.7)):
            sampling = SamplingParams(temperature=temperature, seed=i)
            runs[-1].append(rig.generate(rig.open(random_ids(10 + 9 * i, seed=i)), 8, sampling=sampling))
        rig.run()
        rig.close_all()
    assert [run.tokens for run in runs[0]] == [run.tokens for run in runs[1]]


def test_a_step_is_launched_before_the_one_in_front_is_read(ahead):
    run = ahead.generate(ahead.open(random_ids(10)), 3)
    ahead.step()
    assert (run.tokens, run.request.launched) == ([], 10)
    ahead.step()
    assert (len(run.tokens), run.request.launched) == (1, 11)
    ahead.run()
    assert (len(run.tokens), run.end) == (3, EndReason.LENGTH)
    assert ahead.engine.stats().rows_computed == 12, "its length was known beforehand: no row was for nothing"


def test_a_stop_wastes_one_row_and_keeps_none(ahead, reference):
    text = random_ids(20)
    free = ahead.generate(ahead.open(text), 8)
    ahead.run()
    stop = next(token for i, token in enumerate(free.tokens) if i >= 2)
    at = free.tokens.index(stop) + 1
    sequence, before = ahead.open(text), ahead.engine.stats().rows_computed
    run = ahead.generate(sequence, 8, stop_ids=frozenset({stop}))
    ahead.run()
    assert (run.end, run.tokens) == (EndReason.STOP, free.tokens[:at])
    # The tree answers for all but the prompt's last token: its row, the tokens but the last, and one for nothing.
    assert ahead.engine.stats().rows_computed - before == 1 + at
    assert ahead.engine.ids(sequence) == text + run.tokens
    assert ahead.engine.num_pending(sequence) == 1
    tail = random_ids(3, seed=9)
    ahead.engine.append(sequence, tail)
    assert worst(ahead.logits(sequence), full_forward(reference, text + run.tokens + tail)[-1:]) < TOLERANCE
    ahead.close_all()


def test_tokens_are_told_before_the_next_chunk_is_launched(ahead, monkeypatch):
    run = ahead.generate(ahead.open(random_ids(10)), 12)
    for _ in range(3):
        ahead.step()
    ahead.compute(ahead.open(random_ids(48, seed=1)))
    prefill, untold = ahead.engine.runner.prefill, []

    def noted(parts):
        decodes = run.request.launched - 10
        untold.append(1 + decodes - len(run.tokens))
        return prefill(parts)

    monkeypatch.setattr(ahead.engine.runner, "prefill", noted)
    ahead.run()
    assert untold == [2, 1, 1, 1], "but the first chunk, with which nothing is on its way that takes long"
    ahead.close_all()


def test_a_stop_before_a_chunk_drops_the_decode_that_was_launched(ahead):
    text, sequence = random_ids(10), ahead.open(random_ids(10))
    run = ahead.generate(sequence, 12, stop_after=6)
    for _ in range(3):
        ahead.step()
    other = ahead.compute(ahead.open(random_ids(90, seed=1)))
    ahead.run()  # each step checks the books
    assert (run.end, len(run.tokens), other.end) == (EndReason.LISTENER, 6, EndReason.DONE)
    assert ahead.engine.ids(sequence) == text + run.tokens
    assert ahead.engine.num_pending(sequence) == 1
    ahead.close_all()


def test_a_cancelled_request_lets_go_of_what_is_on_its_way(ahead):
    sequence = ahead.open(random_ids(50))
    run = ahead.generate(sequence, 5)
    ahead.step()
    ahead.step()
    run.request.cancel()
    ahead.run()
    assert (run.end, run.tokens) == (EndReason.CANCELLED, [])
    assert ahead.engine.num_pending(sequence) == 50 - 16, "the chunk that was read stays"
    ahead.close_all()


def test_rows_that_are_no_numbers_fail_their_request_alone(loaded, reference):
    model = loaded("v2-qlora-dense")
    rig = Rig(model, ahead=True)
    good, bad = random_ids(20), random_ids(12, seed=1)
    runs = [rig.generate(rig.open(good), 6), rig.generate(rig.open(bad), 6, forced=[7, POISON, 8, 9])]
    with poisoned(model, with_nan=True):
        rig.run()
    assert [run.end for run in runs] == [EndReason.LENGTH, EndReason.FAILED]
    assert runs[1].tokens == [7, POISON]
    assert worst(runs[0].logits, full_forward(reference, good + runs[0].tokens)[19:-1]) < TOLERANCE
    rig.close_all()


def test_more_requests_than_rows_wait_their_turn(loaded):
    rig = Rig(loaded("v2-qlora-dense"), max_running=2, ahead=True)
    runs = [rig.generate(rig.open(random_ids(10, seed=i)), 4) for i in range(5)]
    rig.step()
    assert (rig.engine.stats().running, rig.engine.stats().queued) == (2, 3)
    rig.run()
    assert all(run.end is EndReason.LENGTH for run in runs)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_decode_that_failed_when_packed_runs_again_on_the_input_it_had(loaded, ahead):
    """The packed pass computed tokens before it failed; the next input is still the one in front of them."""
    tokens = []
    for fails in (False, True):
        rig = Rig(loaded("v2-qlora-dense"), ahead=ahead)
        draw, failed = rig.engine.runner.draw, []

        def once(logits, samplers, indices, draw=draw, failed=failed, fails=fails):
            if fails and len(samplers) > 1 and indices[0] == 3 and not failed:
                failed.append(True)
                raise MemoryError
            return draw(logits, samplers, indices)

        rig.engine.runner.draw = once
        runs = [rig.generate(rig.open(random_ids(10, seed=i)), 8) for i in range(3)]
        rig.run()
        assert [run.end for run in runs] == [EndReason.LENGTH] * 3
        assert bool(failed) == fails
        tokens.append([run.tokens for run in runs])
    assert tokens[0] == tokens[1]


def test_a_request_that_can_not_be_loaded_fails_alone(loaded, monkeypatch):
    def full(array, device):
        raise MemoryError

    rig = Rig(loaded("v2-qlora-dense"), max_running=1)
    sequence = rig.open(random_ids(10))
    rig.prefill(sequence)
    slots = rig.slots(sequence)
    with monkeypatch.context() as during:
        during.setattr("leyline_server.cache.request_table.upload", full)
        run = rig.generate(sequence, 3)
        rig.step()
    assert (run.end, run.error.reason) == (EndReason.FAILED, "MODEL_FAILED")
    assert rig.slots(sequence).tolist() == slots.tolist()
    again = rig.generate(sequence, 3)
    rig.run()
    assert again.end is EndReason.LENGTH
    rig.close_all()
