"""Who runs when, who waits, who is refused, and that a failure is one request's own."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from leyline_proto.refusal import Refusal
from leyline_server.engine.engine import EndReason
from leyline_server.lab.oracle import full_forward
from tests.engine.harness import Rig, random_ids
from tests.engine.pairs import worst

POISON = 130
TOLERANCE = 1e-4


@contextmanager
def poisoned(model, layer=1, with_nan=False):
    """A step that computes POISON fails inside `layer`, or gives NaN there."""
    seen = []

    def look(module, args):
        seen[:] = [args[0] == POISON]

    def act(module, args, output):
        if seen[0].any() and not with_nan:
            raise RuntimeError("injected")
        return output.masked_fill(seen[0][..., None], torch.nan)

    hooks = [
        model.model.model.embed_tokens.register_forward_pre_hook(look),
        model.model.model.layers[layer].mlp.register_forward_hook(act),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("with_nan", [False, True])
def test_a_failing_member_of_a_packed_step_fails_alone(loaded, reference, with_nan):
    model = loaded("v2-qlora-dense")
    rig = Rig(model)
    good, bad, other = random_ids(20), [*random_ids(9, seed=1), POISON, 5], random_ids(30, seed=2)
    sequences = [rig.open(ids) for ids in (good, bad, other)]
    runs = [rig.generate(sequence, 2) for sequence in sequences]
    with poisoned(model, with_nan=with_nan):
        rig.run()
    assert [run.end for run in runs] == [EndReason.LENGTH, EndReason.FAILED, EndReason.LENGTH]
    assert runs[1].error.reason == "MODEL_FAILED"
    for run, ids in ((runs[0], good), (runs[2], other)):
        assert worst(run.logits, full_forward(reference, ids + run.tokens)[len(ids) - 1 : -1]) < TOLERANCE
    # The failed one is as it was, keeps nothing of the step, and works again once the cause is gone.
    assert rig.engine.ids(sequences[1]) == bad
    assert rig.engine.num_pending(sequences[1]) == len(bad)
    assert worst(rig.logits(sequences[1]), full_forward(reference, bad)[-1:]) < TOLERANCE
    rig.close_all()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rows_that_are_no_numbers_are_never_kept(loaded, layer):
    """Neither by the session, whose first chunks were good, nor for others. In the last layer no row shows it."""
    model = loaded("v2-qlora-dense")
    rig = Rig(model, prefill_chunk=8)
    text = [*random_ids(19, seed=1), POISON]
    sequence = rig.open(text)
    with poisoned(model, layer=layer, with_nan=True):
        run = rig.generate(sequence) if layer == 2 else rig.compute(sequence)
        rig.run()
    assert (run.end, run.error.metadata["error"]) == (EndReason.FAILED, "FloatingPointError")
    assert rig.engine.num_pending(sequence) == 4
    assert rig.prefill(rig.open(text)).prefix_hit == 0
    assert torch.isfinite(rig.logits(sequence)).all()


def test_a_failed_decode_keeps_the_tokens_that_were_told(loaded):
    model = loaded("v2-qlora-dense")
    rig = Rig(model)
    text = random_ids(20)
    sequence = rig.open(text)
    run = rig.generate(sequence, 5, forced=[7, 8, POISON, 9])
    with poisoned(model):
        rig.run()
    assert (run.end, run.tokens) == (EndReason.FAILED, [7, 8, POISON])
    assert rig.engine.ids(sequence) == [*text, 7, 8, POISON]
    assert rig.engine.num_pending(sequence) == 1


def test_a_failure_before_the_last_entry_is_computed_anew_leaves_the_old_row(loaded, reference):
    model = loaded("v2-qlora-dense")
    rig = Rig(model)
    text = [*random_ids(20), POISON]
    sequence = rig.open(text)
    rig.prefill(sequence)
    slots, in_use = rig.slots(sequence), rig.engine.stats().in_use
    run = rig.generate(sequence)
    with poisoned(model):
        rig.run()
    assert run.end is EndReason.FAILED
    assert (rig.slots(sequence).tolist(), rig.engine.stats().in_use) == (slots.tolist(), in_use)
    assert rig.engine.num_pending(sequence) == 0


def test_cancelled_in_the_middle_of_a_prefill(loaded, reference):
    """Rows of finished chunks stay; the rest is pending; the session goes on."""
    rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=16)
    text = random_ids(50)
    sequence = rig.open(text)
    run = rig.generate(sequence)
    rig.step()
    rig.step()
    run.request.cancel()
    rig.run()
    assert (run.end, run.tokens) == (EndReason.CANCELLED, [])
    assert rig.engine.num_pending(sequence) == 18
    assert worst(rig.logits(sequence), full_forward(reference, text)[-1:]) < TOLERANCE


def test_cancelled_while_it_generates_and_while_it_waits(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=64)
    text = random_ids(30)
    first, second = rig.open(text), rig.open(random_ids(30, seed=1))
    running, waiting = rig.generate(first, 20), rig.generate(second, 20)
    for _ in range(4):
        rig.step()
    assert (rig.engine.stats().running, rig.engine.stats().queued) == (1, 1)
    waiting.request.cancel()
    running.request.cancel()
    rig.run()
    assert (waiting.end, waiting.report) == (EndReason.CANCELLED, None)
    assert running.end is EndReason.CANCELLED
    assert rig.engine.ids(first) == text + running.tokens
    assert len(running.tokens) == 4


def test_waiting_requests_start_in_order_when_slots_free(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=100, prefill_chunk=16)
    runs = [rig.generate(rig.open(random_ids(40, seed=i)), 5 + i) for i in range(4)]
    ended = []
    while rig.step():
        stats = rig.engine.stats()
        assert stats.running <= 2
        ended += [i for i, run in enumerate(runs) if run.end and i not in ended]
    assert ended == [0, 1, 2, 3]
    assert all(run.end is EndReason.LENGTH for run in runs)


@pytest.mark.parametrize("how", ["cancelled", "all in the tree"])
def test_a_step_that_only_ends_a_request_is_not_the_last(loaded, how):
    """`step` is called until it says that there is nothing to do: what waits behind must not be left."""
    rig = Rig(loaded("v2-qlora-dense"), num_slots=64)
    text = random_ids(40)
    sequence = rig.open(text)
    rig.prefill(sequence)
    if how == "cancelled":
        first = rig.generate(sequence, 15)
        rig.step()
        first.request.cancel()
    else:
        rig.engine.truncate(sequence, 30)
        copy = rig.open(text[:30], namespace=("x", "y"))
        rig.prefill(copy)
        first = rig.compute(sequence)
    waiting = rig.generate(rig.open(random_ids(30, seed=3)), 30)
    rig.run()
    assert first.end is not None
    assert waiting.end is EndReason.LENGTH


def test_pool_exceeded_names_the_numbers(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=50)
    sequence = rig.open(random_ids(40))
    with pytest.raises(Refusal) as caught:
        rig.generate(sequence, 12)  # the last token stays pending
    assert caught.value.reason == "POOL_EXCEEDED"
    assert caught.value.metadata == {"needed": "51", "limit": "50", "free": "50"}
    assert rig.engine.sequences[sequence].request is None
    run = rig.generate(sequence, 11)
    rig.run()
    assert run.end is EndReason.LENGTH
    rig.engine.append(sequence, random_ids(1))
    with pytest.raises(Refusal):
        rig.compute(sequence)


def test_queue_full(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=60, max_queue=2)
    rig.generate(rig.open(random_ids(30)), 20)
    rig.step()
    waiting = [rig.generate(rig.open(random_ids(30)), 20) for _ in range(2)]
    late = rig.open(random_ids(5))
    with pytest.raises(Refusal) as caught:
        rig.compute(late)
    assert caught.value.reason == "QUEUE_FULL"
    assert (caught.value.metadata["waiting"], caught.value.metadata["limit"]) == ("2", "2")
    assert "2 requests wait for slots; the limit is 2" in caught.value.message
    rig.run()
    assert all(run.end is EndReason.LENGTH for run in waiting)
    rig.prefill(late)


def test_queue_full_of_requests_without_a_place(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=500, max_queue=2, max_running=1)
    runs = [rig.generate(rig.open(random_ids(10, seed=number)), 20) for number in range(3)]
    rig.step()
    with pytest.raises(Refusal) as caught:
        rig.generate(rig.open(random_ids(10, seed=4)), 20)
    assert "2 requests wait for one of the 1 that may run at once to end; the limit is 2" in caught.value.message
    rig.run()
    assert all(run.end is EndReason.LENGTH for run in runs)


@pytest.mark.parametrize("max_queue", [0, 2])
def test_a_burst_that_fits_the_pool_is_not_refused(loaded, max_queue):
    """Requests that come between two steps wait for the step, not for slots."""
    rig = Rig(loaded("v2-qlora-dense"), num_slots=100, max_queue=max_queue)
    runs = [rig.generate(rig.open(random_ids(10, seed=i)), 10) for i in range(5)]
    if not max_queue:
        with pytest.raises(Refusal, match="the limit is 0"):
            rig.generate(rig.open(random_ids(10, seed=6)))
    rig.run()
    assert all(run.end is EndReason.LENGTH for run in runs)


def test_a_long_prefill_does_not_hold_up_a_decode(loaded):
    rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=16)
    decoding = rig.generate(rig.open(random_ids(10)), 20)
    rig.step()
    prefill = rig.compute(rig.open(random_ids(200, seed=1)))
    for step in range(2, 12):
        rig.step()
        assert len(decoding.tokens) == step, "a token in every step"
    assert prefill.end is None
    rig.run()
    assert prefill.end is EndReason.DONE
    # 15 rows beside each of 13 decodes, then what is left.
    assert rig.engine.stats().steps == 1 + 19


@pytest.mark.parametrize("ahead", [False, True])
def test_a_short_message_does_not_wait_for_a_long_text(loaded, ahead):
    """Also when nobody decodes yet, so that the long one had the device, and its larger chunk, to itself."""
    rig = Rig(loaded("v2-qlora-dense"), num_slots=2000, prefill_chunk=16, alone_chunk=64, ahead=ahead)
    long = rig.compute(rig.open(random_ids(1000)))
    rig.step()
    rig.step()
    before = rig.engine.num_pending(1)
    short = rig.generate(rig.open(random_ids(8, seed=5)), 4)
    while not short.tokens:
        rig.step()
    assert before - rig.engine.num_pending(1) <= (64 if ahead else 0) + 16, "what was on its way, and a share"
    rig.run()
    assert long.end is EndReason.DONE


def test_shares_of_a_chunk_are_equal_and_none_is_wasted(loaded):
    rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=30)
    sequences = [rig.open(random_ids(length, seed=length)) for length in (100, 4, 90)]
    for sequence in sequences:
        rig.compute(sequence)
    rig.step()
    assert [rig.engine.num_pending(sequence) for sequence in sequences] == [100 - 13, 0, 90 - 13]


def test_lists_of_one_pass_are_no_longer_than_one_may_be(loaded):
    """What an expanded pass takes in memory is bounded by the longest context; the oldest is never passed over."""
    rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=30, max_context=120)
    first, second, third = (rig.open(random_ids(length, seed=length)) for length in (80, 50, 30))
    for sequence in (first, second, third):
        rig.compute(sequence)
    rig.step()
    assert [rig.engine.num_pending(s) for s in (first, second, third)] == [65, 50, 15]
    rig.run()
    assert [rig.engine.num_pending(s) for s in (first, second, third)] == [0, 0, 0]


def test_context_exceeded_names_the_numbers(loaded):
    rig = Rig(loaded("v2-qlora-dense"), max_context=32)
    sequence = rig.open(random_ids(30))
    with pytest.raises(Refusal) as caught:
        rig.generate(sequence, 4)
    assert (caught.value.reason, caught.value.metadata) == ("CONTEXT_EXCEEDED", {"needed": "33", "limit": "32"})
    assert rig.generate(sequence, 3).end is None
    rig.run()
    with pytest.raises(Refusal, match="computes 33 entries"):
        rig.compute(rig.open(random_ids(33)))


def test_more_decodes_than_a_step_holds_all_go_on(loaded):
    rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=4)
    runs = [rig.generate(rig.open(random_ids(4, seed=i)), 12) for i in range(9)]
    rig.run()
    assert all(run.end is EndReason.LENGTH for run in runs)


def test_idle_rows_give_way_least_recently_used_first(loaded):
    rig = Rig(loaded("v2-qlora-dense"), num_slots=100)
    first, second = (rig.open(random_ids(40, seed=i)) for i in range(2))
    rig.prefill(first)
    rig.prefill(second)
    rig.engine.cache.clear_caches()
    rig.logits(first)
    rig.engine.cache.clear_caches()
    rig.prefill(rig.open(random_ids(30, seed=2)))
    assert (rig.engine.num_pending(second), rig.engine.num_pending(first)) == (40, 1)
