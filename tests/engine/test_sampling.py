"""From logits to tokens: seeds, top-k, top-p, temperature, forced ids, stops."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from leyline_server.engine.engine import EndReason
from leyline_server.sampling import Sampler, SamplingParams, draw, greedy
from tests.engine.harness import Rig, random_ids

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])


def _draw(count=4000, **params) -> dict[int, float]:
    sampler = Sampler(SamplingParams(seed=1, **params))
    drawn = draw(LOGITS.expand(count, -1), [sampler] * count, range(count))
    return {token: times / count for token, times in Counter(drawn.tolist()).items()}


def test_temperature_zero_is_greedy():
    assert _draw(20, temperature=0.0) == {0: 1.0}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    want = (LOGITS / temperature).softmax(-1)
    got = _draw(temperature=temperature)
    assert set(got) <= {0, 1, 2, 3}, "never what has no probability"
    for token, share in got.items():
        assert abs(share - float(want[token])) < 0.03


def test_top_k_keeps_the_k_best_in_proportion():
    got = _draw(temperature=1.0, top_k=2)
    assert set(got) == {0, 1}
    assert abs(got[0] - float(LOGITS[:2].softmax(-1)[0])) < 0.03
    assert set(_draw(200, temperature=1.0, top_k=1)) == {0}
    assert set(_draw(temperature=1.0, top_k=100)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    shares = LOGITS.softmax(-1)  # 0.64, 0.24, 0.09, 0.03
    assert set(_draw(temperature=1.0, top_p=float(shares[0]) - 0.01)) == {0}
    got = _draw(temperature=1.0, top_p=float(shares[0]) + 0.01)
    assert set(got) == {0, 1}
    assert abs(got[0] - float(LOGITS[:2].softmax(-1)[0])) < 0.03
    assert set(_draw(200, temperature=1.0, top_p=1e-6)) == {0}, "at least one token"


def test_top_k_comes_before_top_p():
    """Of the two best, renormalised to 0.73 and 0.27, 0.7 needs one alone; of all, it needs two."""
    assert set(_draw(temperature=1.0, top_k=2, top_p=0.7)) == {0}
    assert set(_draw(temperature=1.0, top_p=0.7)) == {0, 1}


def test_no_number_draws_what_has_no_probability():
    class Highest(Sampler):
        def uniform(self, index):
            return 1 - 2**-53  # 1.0 in fp32

    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    drawn = draw(logits, [Highest(SamplingParams(temperature=1.0, top_k=1))], [0])
    assert drawn.tolist() == [int(logits.argmax())]
    drawn = draw(logits, [Highest(SamplingParams(temperature=1.0, top_p=0.5))], [0])
    shares, order = logits.softmax(-1).sort(descending=True)
    assert int(drawn) in order[0, : int((shares.cumsum(-1) < 0.5).sum()) + 1].tolist()


def test_a_greedy_tie_falls_alike_alone_and_beside_others():
    logits = torch.randn(50, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    both = [Sampler(SamplingParams()), Sampler(SamplingParams(temperature=1.0, seed=1))]
    drawn = [int(draw(row.expand(2, -1), both, [0, 0])[0]) for row in logits]
    assert drawn == greedy(logits).tolist()


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(loaded):
    params = SamplingParams(temperature=1.0, seed=11)
    text, drawn = random_ids(30), []
    for others in (0, 3):
        rig = Rig(loaded("v2-qlora-dense"), prefill_chunk=16 if others else 64)
        for i in range(others):
            rig.generate(rig.open(random_ids(20, seed=i)), 30, sampling=SamplingParams(temperature=1.0, seed=i))
        run = rig.generate(rig.open(text), 16, sampling=params)
        rig.run()
        drawn.append(run.tokens)
    assert drawn[0] == drawn[1]
    other = rig.generate(rig.open(text), 16, sampling=SamplingParams(temperature=1.0, seed=12))
    rig.run()
    assert other.tokens != drawn[0]


def test_without_a_seed_every_request_differs(rig):
    text = random_ids(30)
    runs = [rig.generate(rig.open(text), 16, sampling=SamplingParams(temperature=1.0)) for _ in range(2)]
    rig.run()
    assert runs[0].tokens != runs[1].tokens


def test_forced_ids_come_first(rig):
    run = rig.generate(rig.open(random_ids(30)), 6, force_ids=(5, 6, 7))
    free = rig.generate(rig.open([*random_ids(30), 5, 6, 7]), 3)
    rig.run()
    assert run.tokens == [5, 6, 7, *free.tokens]


def test_ends(rig):
    text = random_ids(30)
    sequence = rig.open(text)
    plain = rig.generate(sequence, 5)
    rig.run()
    assert (plain.end, len(plain.tokens)) == (EndReason.LENGTH, 5)
    stopped = rig.generate(rig.open(text), 5, stop_ids=frozenset({plain.tokens[2]}))
    listener = rig.generate(rig.open(text), 5, stop_after=2)
    both = rig.generate(rig.open(text), 1, stop_ids=frozenset({plain.tokens[0]}))
    rig.run()
    at = plain.tokens.index(plain.tokens[2]) + 1
    assert (stopped.end, stopped.tokens) == (EndReason.STOP, plain.tokens[:at])
    assert (listener.end, listener.tokens) == (EndReason.LISTENER, plain.tokens[:2])
    assert both.end is EndReason.STOP


def test_ids_beyond_the_sampled_vocabulary_are_never_drawn(loaded, reference):
    from leyline_server.engine.local import LocalEngine
    from leyline_server.lab.oracle import full_forward

    text = random_ids(30)
    best = int(full_forward(reference, text)[-1].argmax())
    rig = Rig(loaded("v2-qlora-dense"))
    rig.engine = LocalEngine(loaded("v2-qlora-dense"), 128, 64, 8, sampled_vocab=best)
    run = rig.generate(rig.open(text), 8)
    rig.run()
    assert max(run.tokens) < best
