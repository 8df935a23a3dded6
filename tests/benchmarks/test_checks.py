"""A benchmark's check lets nothing wrong be timed: each one passes as things are, and fails once they are broken."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import leyline_kernels
from benchmarks import agreement, decode, decode_inputs, interference, prefill, registry, rotate, splice
from benchmarks.bench import WrongResult
from benchmarks.registry import SHAPES, Bed
from leyline_server.model.runner import Runner


def test_rotation(bed, monkeypatch):
    rotate.check(bed)
    monkeypatch.setattr(leyline_kernels, "rotate", lambda **given: None)
    with pytest.raises(WrongResult, match="rotated keys err"):
        rotate.check(bed)


def test_rotation_off_by_one(bed, monkeypatch):
    real = leyline_kernels.rotate
    monkeypatch.setattr(leyline_kernels, "rotate", lambda **given: real(**{**given, "delta": given["delta"] + 1}))
    with pytest.raises(WrongResult, match="rotated keys err"):
        rotate.check(bed)


@pytest.mark.parametrize("turning", decode_inputs.TURNINGS)
def test_decode_attention(bed, monkeypatch, turning):
    given = decode_inputs.make(bed, 3, 200, turning)
    decode.check_kernel(given, turning)
    real = leyline_kernels.decode

    def unturned(*args):
        return real(*args[:7], None, *args[8:])

    if given.kv_delta is not None:
        monkeypatch.setattr(leyline_kernels, "decode", unturned)
        with pytest.raises(WrongResult):
            decode.check_kernel(given, turning)
    monkeypatch.setattr(leyline_kernels, "decode", lambda *args: torch.zeros_like(args[0]))
    with pytest.raises(WrongResult, match="errs by 1"):
        decode.check_kernel(given, turning)


def test_inputs_are_what_their_names_say(bed):
    unturned, piecewise, different = (decode_inputs.make(bed, 2, 640, turning) for turning in decode_inputs.TURNINGS)
    assert unturned.kv_delta is None
    assert sorted(piecewise.kv_slots.tolist()) == list(range(2 * 640))
    assert piecewise.kv_slots.tolist() != sorted(piecewise.kv_slots.tolist())
    for row in piecewise.kv_delta.view(2, -1):
        changes = int((row[1:] != row[:-1]).sum())
        assert 1 <= changes <= decode_inputs.EDITS
    assert bool((different.kv_delta[1:640] != different.kv_delta[:639]).all())
    assert piecewise.row_bytes == 2 * 640 * 4 * (32 + 16)


@pytest.mark.usefixtures("unchecked")
def test_the_engine_against_hugging_face(bed, monkeypatch):
    agreement.check(bed)
    assert agreement._checked
    agreement._checked.clear()
    monkeypatch.setattr(leyline_kernels, "extend", lambda q_latent, *args, **more: torch.zeros_like(q_latent))
    with pytest.raises(WrongResult, match="below the best"):
        agreement.check(bed)


def test_a_prefill_that_finds_something_is_no_prefill(bed, monkeypatch):
    prefill.check(bed)
    monkeypatch.setattr(type(bed), "ids", lambda self, count, seed: [300] * count)
    engine = bed.parts().engine
    monkeypatch.setattr(prefill, "_once", _twice(prefill._once, engine))
    with pytest.raises(WrongResult, match="computed"):
        prefill.check(bed)


def _twice(once, engine):
    def again(*args, **more):
        once(*args, **more)
        rows = engine.stats().rows_computed
        watch = once(*args, **more)
        assert engine.stats().rows_computed > rows
        return watch

    return again


def test_slots_that_do_not_fall_are_noticed(bed, monkeypatch):
    splice.check(bed)
    monkeypatch.setattr(splice, "in_use", lambda server: 7)
    with pytest.raises(WrongResult, match="slots in use fell by 0"):
        splice.check(bed)


def test_a_forget_that_computes_too_little_is_noticed(bed, monkeypatch):
    interference.check(bed)
    monkeypatch.setattr(interference, "_forget", lambda engine, sequence, bed, seed: None)
    with pytest.raises(WrongResult, match="computed 0 rows"):
        interference.check(bed)


def test_a_message_after_the_forget_is_not_beside_it(bed, monkeypatch):
    figures = list(interference.rows(bed, "small"))
    first_tokens = [figure for figure in figures if figure.metric == "first token"]
    assert tuple(figure.arm for figure in first_tokens) == interference.MESSAGES
    assert all(figure.n == interference.ROUNDS and figure.value > 0 for figure in first_tokens)
    bed.parts().engine.check_integrity()
    monkeypatch.setattr(interference, "UNDER_WAY", 1000)
    with pytest.raises(WrongResult, match="was over before the message"):
        list(interference.rows(bed, "small"))


def test_the_unturned_step_runs_in_graphs_that_can_not_turn(bed, monkeypatch):
    happened = []
    monkeypatch.setattr(Runner, "warm_up", lambda self, turned=True: happened.append(turned))
    real = decode.step_ms

    def noted(engine, sequences):
        moved = any(state.rows.turned(engine.cache.table).any() for state in engine.sequences.values())
        happened.append("moved" if moved else "not moved")
        return real(engine, sequences)

    monkeypatch.setattr(decode, "step_ms", noted)
    engine = bed.parts().engine
    arms = [figure.arm for figure in decode.rows(bed, "step 16 x 8k") if figure.metric == "step"]
    assert arms == ["leyline, unturned", "leyline, could turn, nothing moved", "leyline, turned"]
    assert happened == [False, "not moved", True, "not moved", "moved"]

    def broken(engine, sequences):
        raise RuntimeError("no step")

    monkeypatch.setattr(decode, "step_ms", broken)
    with pytest.raises(RuntimeError, match="no step"):
        list(decode.rows(bed, "step 16 x 8k"))
    assert happened[-2:] == [False, True], "the next benchmark has an engine that can't turn"
    assert bed.parts().engine is engine


def test_the_default_prefill_leaves_the_chunk_to_the_server(monkeypatch):
    monkeypatch.setattr(registry, "build", lambda config, model: SimpleNamespace(config=config))
    monkeypatch.setattr(registry, "empty", lambda parts: None)
    monkeypatch.setattr(Bed, "model", None)
    full = Bed(SHAPES["lite"], torch.device("cpu"), torch.bfloat16)
    chunks = [full.parts(prefill._chunk(full, case)).config.prefill_chunk for case in prefill.cases(full)]
    assert chunks == [None, 2048]
    assert full.parts().config.prefill_chunk is None


def test_no_goal_is_judged_at_a_toys_sizes(bed, monkeypatch):
    took = {"empty_ms": [1.0] * 5, "call_ms": [2.0] * 5, "server_ms": [1.0] * 5, "fall": [16] * 2}
    monkeypatch.setattr(splice.clients, "run", lambda *args: json.dumps(took))
    figures = list(splice.rows(bed, "edit at 32k"))
    assert "slots in use fall by" in {figure.metric for figure in figures}
    assert all(figure.goal is None and figure.met is None for figure in figures)
