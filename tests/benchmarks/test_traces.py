"""Recorded conversations as ids: lengths, waits, what a policy cuts, and the arms over them."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import agreement, trace_input, traces
from benchmarks.arms import edited
from benchmarks.bench import WrongResult
from benchmarks.paper_table import EAGER, IDEAL, LEYLINE, REPREFILL
from benchmarks.registry import SHAPES, Bed
from benchmarks.trace_input import Encoder, History, load
from leyline_policies import KeepLast


def _chat(turns: int) -> dict:
    """A conversation whose every turn calls a tool and gets an output of its own."""
    messages = [{"role": "system", "content": "You look things up."}, {"role": "user", "content": "Go."}]
    for turn in range(turns):
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "look", "arguments": json.dumps({"at": turn})},
        }
        messages.append({"role": "assistant", "content": f"Step {turn}.", "tool_calls": [call]})
        output = " ".join(f"line{turn}.{number}" for number in range(40))
        messages.append({"role": "tool", "content": output, "tool_call_id": f"c{turn}"})
    return {"traj": [*messages, {"role": "assistant", "content": "Done."}]}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "tau-bench").mkdir()
    (tmp_path / "tau-bench" / "chats.json").write_text(json.dumps([_chat(5), _chat(1)]))
    folder = tmp_path / "lmcache-agent-trace" / "miniswe"
    folder.mkdir(parents=True)
    first, answer = "Fix it.", "I look.\n```bash\nls\n```"
    second = f"{first}\n{answer}\n<output>a.py</output>\n"
    lines = [
        {"timestamp": 1_000_000, "input": first, "output": answer},
        {"timestamp": 3_500_000, "input": second, "output": answer},
        {"timestamp": 4_000_000, "input": f"{second}{answer}\n<output>b.py</output>\n", "output": "Done."},
    ]
    (folder / "one.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_what_is_read_of_a_set(root):
    encoder = Encoder(1280)
    (long,) = load(root, "tau-bench", encoder, most=8, turns=40)  # the other has too few replies
    assert len(long.steps) == 6
    assert [said.message.role for said in long.steps[0].messages] == ["system", "user"]
    assert [step.wait_s for step in long.steps] == [0.0] + [trace_input.DEFAULT_WAIT_S] * 5
    for step in long.steps:
        for said in (*step.messages, step.reply):
            assert said.message.num_tokens == len(said.all_ids)
            assert all(16 <= one < 1280 for one in said.ids)
    assert len(load(root, "tau-bench", encoder, most=8, turns=4)[0].steps) == 4
    assert load(root, "tau-bench", encoder, most=0, turns=4) == []


def test_recorded_waits_are_the_gaps_between_requests(root):
    (one,) = load(root, "miniswe", Encoder(1280), most=8, turns=40)
    assert [step.wait_s for step in one.steps] == [0.0, 2.5, 0.5]
    assert one.steps[1].messages[0].message.role == "tool"


def test_equal_text_has_equal_ids_and_another_other_ones():
    encoder = Encoder(1280)
    assert encoder.encode("the same text") == encoder.encode("the same text")
    assert encoder.encode("the same text") != encoder.encode("another text")
    assert trace_input._four_characters("abcdefgh") != trace_input._four_characters("abcdefgi")
    assert len(trace_input._four_characters("abcdefghi")) == 3


def test_a_policy_cuts_the_outputs_it_means(root):
    encoder = Encoder(1280)
    (recording,) = load(root, "tau-bench", encoder, most=1, turns=40)
    history, ids, cut = History(KeepLast(1), encoder), list[int](), []
    for number, step in enumerate(recording.steps):
        history.add([said.message for said in step.messages], number)
        ids += [one for said in step.messages for one in said.all_ids]
        cuts = history.cuts()
        cut += [ids[one.start : one.end] for one in cuts]
        ids = edited(ids, cuts)
        assert history.num_tokens == len(ids)
        ids += step.reply.all_ids
        history.add([step.reply.message], number + 1)
    outputs = [list(step.messages[-1].ids) for step in recording.steps[1:]]
    assert cut == outputs[:4], "all outputs that were read, but the newest"
    assert History(None, encoder).cuts() == []


def test_the_arms_replay_the_same_texts(root, monkeypatch):
    bed = _bed(root, monkeypatch)
    assert traces.missing(bed) == ""
    assert [case.partition(",")[0] for case in traces.cases(bed)] == ["miniswe"] * 4 + ["tau-bench"] * 4
    monkeypatch.setattr(traces, "cases", lambda bed: ["tau-bench, KeepLast(3)"])
    traces.check(bed)
    recordings = traces._recordings(bed, "tau-bench")
    cells = {arm: traces.run_arm(bed, arm, recordings, KeepLast(1)) for arm in (REPREFILL, LEYLINE)}
    nobody = traces.run_arm(bed, IDEAL, recordings, None)
    assert cells[LEYLINE].prefilled < cells[REPREFILL].prefilled
    prompts = [sum(turn.prompt for turn in cell.turns) for cell in (*cells.values(), nobody)]
    assert prompts[0] == prompts[1] < prompts[2]


def test_arms_that_end_differently_are_noticed(root, monkeypatch):
    bed = _bed(root, monkeypatch)
    monkeypatch.setattr(traces, "cases", lambda bed: ["tau-bench, KeepLast(3)"])
    real = traces.run_arm

    def forgetful(bed, arm, recordings, policy):
        return real(bed, arm, recordings, policy if arm == LEYLINE else None)

    monkeypatch.setattr(traces, "run_arm", forgetful)
    with pytest.raises(WrongResult, match="other ids"):
        traces.check(bed)


def test_an_arm_runs_once_unmeasured_before_its_first_case_of_a_set(root, monkeypatch):
    bed, ran = _bed(root, monkeypatch), []
    cell = traces.run_arm(bed, IDEAL, traces._recordings(bed, "tau-bench"), None)

    def noted(bed, arm, recordings, policy):
        ran.append(arm)
        return cell

    monkeypatch.setattr(traces, "run_arm", noted)
    arms = [REPREFILL, traces.BATCHED, EAGER, LEYLINE]
    figures = [list(traces.rows(bed, f"tau-bench, {policy}")) for policy in ("KeepLast(3)", "KeepLast(5)")]
    assert ran == arms * 3
    assert [figure.arm for figure in figures[0] if figure.metric == "engine busy"] == arms
    list(traces.rows(bed, "miniswe, KeepLast(3)"))
    assert ran == arms * 5


def test_without_recordings_it_is_left_out(bed, tmp_path):
    assert "LEYLINE_TRACES" in traces.missing(bed)
    nowhere = Bed(bed.shape, bed.device, bed.dtype, traces=tmp_path / "nowhere")
    assert "no directory" in traces.missing(nowhere)


def _bed(root, monkeypatch):
    monkeypatch.setattr(agreement, "check", lambda bed: None)  # test_checks has it
    bed = Bed(SHAPES["toy"], torch.device("cpu"), torch.float32, traces=root)
    # Outputs of 40 words stay whole: at a 64th of their length no policy would save anything.
    monkeypatch.setattr(traces, "_recordings", lambda bed, name: load(root, name, Encoder(1280), 2, 8))
    return bed
