"""Arms: the ways to go on after an edit, over the same messages. Each makes a list and its KV in the lab's engine.

    F   nothing is edited                           R   the edited text, computed honestly (FORGET)
    L   AMORTIZE                                    L+k, L+p   with a repair of the first k, of p %
    N   as L, keys not turned: a negative control   G   as L without R, positions kept: a gap where the span was
    E   nothing is edited; the agent is told to ignore the result, and asked again
    Z   F again, computed in other passes: the noise floor

N and G are what no server here offers: they misplace rows of their own, whose books then say what is not so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from leyline_proto import leyline_pb2 as pb
from leyline_proto.char_range import content_range
from leyline_proto.conversation import Conversation
from leyline_proto.directives import Cut
from leyline_proto.repair import NO_REPAIR, Repair
from leyline_proto.spans import CALL, TEXT
from leyline_server.edit.rows import Rows
from leyline_server.engine.engine import RowEdit, SequenceId
from leyline_server.lab.laboratory import Lab
from leyline_server.lab.scenes import READ_FILE, Scene, SceneEdit, Step, read_call

IGNORE: Final = "Ignore what you have read in {path}."


@dataclass(frozen=True, slots=True)
class Arm:
    """`edits`: how the result goes; "" leaves it. `misplaces`: by which rule rows stand where they should not."""

    name: str
    edits: str = "amortize"  # or "forget", "", "erratum"
    repair: Repair = NO_REPAIR
    misplaces: str = ""  # or "unturned", "gap"
    split: bool = False  # computed message by message

    @property
    def own_rows(self) -> bool:
        """Whether it may not share rows with other arms, and computes all of its own."""
        return bool(self.misplaces) or self.split


F: Final = Arm("F", "")
R: Final = Arm("R", "forget")
L: Final = Arm("L")
REPAIRS: Final = (
    Arm("L+16", repair=Repair(first=16)),
    Arm("L+64", repair=Repair(first=64)),
    Arm("L+5%", repair=Repair(share=0.05)),
    Arm("L+15%", repair=Repair(share=0.15)),
    Arm("L+50%", repair=Repair(share=0.5)),
)
NOISE: Final = Arm("Z", "", split=True)
ARMS: Final = (F, R, L, *REPAIRS, Arm("N", misplaces="unturned"), Arm("G", misplaces="gap"), Arm("E", "erratum"), NOISE)


@dataclass
class Played:
    """A scene on its way in one arm. `computed`: entries that the edits made the arm compute, answers left out."""

    lab: Lab
    arm: Arm
    conversation: Conversation
    sequence: SequenceId
    computed: int = 0

    def append(self, messages: Sequence[pb.Message]) -> None:
        self.conversation, change = self.conversation.append(messages, self.lab.format)
        self.lab.engine.append(self.sequence, change.ids)

    def edit(self, edit: SceneEdit, asked_again: str) -> None:
        """As a directive would, with the conversation's own rules. An erratum ends with the question that still waits
        for its answer, if there is one."""
        if not self.arm.edits:
            return
        if self.arm.edits == "erratum":
            before = len(self.conversation.table)
            self.append([pb.Message(role=pb.ROLE_USER, content=f"{IGNORE.format(path=edit.path)}{asked_again}")])
            self.computed += len(self.conversation.table) - before
            return
        index, first = self.conversation.table.find(edit.message_id)
        start, end = content_range(self.conversation.table.messages[index], first, TEXT)
        ids = () if self.arm.misplaces == "gap" else tuple(self.lab.format.encode(edit.text))
        forget = self.arm.edits == "forget"
        mode = pb.MODE_FORGET if forget else pb.MODE_AMORTIZE
        self.conversation, applied = self.conversation.edit([Cut(start, end, ids, mode, "")], [""])
        row = RowEdit(start, end, ids, applied[0].edit_id, forget, repair=self.arm.repair)
        self.computed += self.lab.splice(self.sequence, row).to_compute
        if self.arm.misplaces == "unturned":
            _misplace(self.lab, self.sequence, start + len(ids), None, len(ids) - (end - start))
        elif self.arm.misplaces == "gap":
            _misplace(self.lab, self.sequence, 0, start, end - start)

    def ask(self, opening: Sequence[int]) -> None:
        """Opens the assistant's message and says how it begins."""
        self.conversation, marker = self.conversation.begin_turn(self.lab.format, raw=False)
        self.lab.engine.append(self.sequence, [*marker, *opening])


def _misplace(lab: Lab, sequence: SequenceId, start: int, end: int | None, by: int) -> None:
    """The books say of the rows [start, end) that they were written `by` positions on. Nothing else may hold them."""
    state, table = lab.engine.sequences[sequence], lab.engine.cache.table
    rows = state.rows
    slots = rows.slots[start:end]
    slots = slots[slots >= 0]
    table.written_at[slots] += by
    table.context[slots] = 0  # they are exact no more
    state.rows = Rows.of(rows.ids, rows.slots)


def play(lab: Lab, scene: Scene, arms: Sequence[Arm]) -> list[Played]:
    """The scene in all arms, up to its question; what stands before the first edit is computed once for most."""
    shared = _begin(lab, F)
    first = next((at for at, step in enumerate(scene.steps) if step.edits), len(scene.steps))
    _compute(lab, shared, scene.steps[: first + 1])
    played = []
    for arm in arms:
        if arm.own_rows:
            one = _begin(lab, arm)
            _compute(lab, one, scene.steps[: first + 1])
        else:
            one = replace(shared, arm=arm, sequence=lab.fork(shared.sequence))
        played.append(one)
    for at in range(first, len(scene.steps)):
        for one in played:
            if at > first:
                _compute(lab, one, scene.steps[at : at + 1])
            last = at == len(scene.steps) - 1
            for edit in scene.steps[at].edits:
                one.edit(edit, f" {scene.question}" if last else "")
    return played


def _begin(lab: Lab, arm: Arm) -> Played:
    return Played(lab, arm, Conversation("lab", (READ_FILE,)), lab.open())


def _compute(lab: Lab, one: Played, steps: Sequence[Step]) -> None:
    for step in steps:
        for messages in [[message] for message in step.messages] if one.arm.split else [list(step.messages)]:
            one.append(messages)
            if not one.arm.split or messages[0].role != pb.ROLE_ASSISTANT:
                lab.prefill(one.sequence)


STEMS: Final = ("{lead}", "{key} = ", "The value of {key} in {path} is ")
"""How a model begins an answer in text: what is compared is the token behind it."""


def opening_ids(lab: Lab, scene: Scene, stem: str) -> tuple[list[int], list[int]]:
    """How the answer begins, and the told answer behind it, in tokens: what answers that tell different values have in
    common in front is the opening. So no token is compared that every answer begins with."""
    bodies = [_body(lab, scene, stem, value) for value in (scene.told, "0" + scene.told)]
    same = next(at for at, (a, b) in enumerate(zip(*bodies, strict=False)) if a != b)
    return list(bodies[0][:same]), list(bodies[0][same:])


def _body(lab: Lab, scene: Scene, stem: str, value: str) -> tuple[int, ...]:
    """The ids of an assistant's message that gives this value, from behind its opening marker to the value's end."""
    if scene.calls:
        message = pb.Message(role=pb.ROLE_ASSISTANT, tool_calls=[read_call(value, "c")])
    else:
        message = pb.Message(
            role=pb.ROLE_ASSISTANT, content=stem.format(lead=scene.lead, key=scene.key, path=scene.path) + value
        )
    rendered = lab.format.render(message, [call.id for call in message.tool_calls], (), False)
    ends = np.cumsum([part.length for part in rendered.parts])
    kind = CALL if scene.calls else TEXT
    last = next(at for at, part in enumerate(rendered.parts) if part.kind == kind)
    return rendered.ids[len(lab.format.open_assistant(False).ids) : int(ends[last])]
