"""Measure: what content hits do to answers. An agent asks about files that another session has read before, behind
another system prompt and in another order; their texts are taken from the cache where they are found.

    F   all of it computed                          C   content hits, nothing repaired
    C+k the first k of each hit computed (EPIC)     C+p p % of each hit, by deviation (CacheBlend)
    N   as C, keys not turned: naive reuse          Z   F again, computed in other passes: the noise floor

A needle is a value in one of the files, the same key standing in others too; one hop reads it where it was asked for,
two hops read a file that points to another. Owns its scenes, arms and figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from leyline_proto import leyline_pb2 as pb
from leyline_proto.conversation import Conversation
from leyline_proto.repair import NO_REPAIR, Repair
from leyline_proto.reuse import PREFIX, Reuse
from leyline_server.cache.chunks import SINK
from leyline_server.engine.engine import Namespace, SequenceId
from leyline_server.lab.arms import opening_ids
from leyline_server.lab.figures import Figure, share, spread
from leyline_server.lab.following import ANSWER_TOKENS, CLEAR, Progress, common_share, heard, tells
from leyline_server.lab.laboratory import Lab, Question
from leyline_server.lab.recording import divergence
from leyline_server.lab.scenes import READ_FILE, SYSTEM_PROMPT, Author, Scene, Step, asks_one

BENCH: Final = "content"
KINDS: Final = ("one hop", "two hops", "one hop, other questions", "two hops, other questions")
"""The other session asked the same of its files, or something else: what it computed of a file knows the question."""
FILES: Final = 6  # read in a scene
_LINES: Final = (7, 9)  # beside the asked one, of each file: some 90 tokens
_OTHER_PROMPT: Final = (
    "You are an auditor. Go through every file that you are given, one after another. " + SYSTEM_PROMPT
)


@dataclass(frozen=True, slots=True)
class Arm:
    """How the asking session's KV is made."""

    name: str
    reuse: Reuse = PREFIX
    turned: bool = True
    split: bool = False  # computed in several passes


def _content(repair: Repair = NO_REPAIR) -> Reuse:
    return Reuse(pb.REUSE_CONTENT, repair)


F: Final = Arm("F")
ARMS: Final = (
    F,
    Arm("C", _content()),
    Arm("C+4", _content(Repair(first=4))),
    Arm("C+16", _content(Repair(first=16))),
    Arm("C+5%", _content(Repair(share=0.05))),
    Arm("C+15%", _content(Repair(share=0.15))),
    Arm("C+50%", _content(Repair(share=0.5))),
    Arm("N", _content(), turned=False),
    Arm("Z", split=True),
)


@dataclass(frozen=True, slots=True)
class Moved:
    """`scene`: the asking session. `source`: what another session has read before."""

    scene: Scene
    source: tuple[pb.Message, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer in one scene."""

    right: bool
    first: int
    margin: float
    kl: float  # nats, from F's next-token distribution to this arm's
    tokens: tuple[int, ...]
    hit: int
    computed: int


def make_moved(kind: str, seed: int) -> Moved:
    """A scene of one kind. Its last task has the needle; each other one reads a file, and is answered."""
    hops, _, questions = kind.partition(", ")
    rng = Random(f"content/{hops}/{seed}")
    author, other = Author(rng, 0), Author(rng, 0)
    key = author.word()
    told, _ = author.answers(author.number, "123456789")
    paths = [author.path() for _ in range(FILES)]
    values = [*(author.number() for _ in paths[1:]), told]
    if hops == "two hops":
        values[-2] = f"see {paths[-1]}"
    files = [(path, author.file(key, value, _LINES)(value)) for path, value in zip(paths, values, strict=True)]
    last = 2 if hops == "two hops" else 1
    tasks = [*([file] for file in files[:-last]), files[-last:]]
    answers = [*values[:-last], told]

    def told_of(task: Sequence[tuple[str, str]], question: str, by: Author) -> list[pb.Message]:
        return [by.user(question), *(message for file in task for message in by.reads(file))]

    messages = [pb.Message(role=pb.ROLE_SYSTEM, content=SYSTEM_PROMPT, message_id=author.id())]
    source = [pb.Message(role=pb.ROLE_SYSTEM, content=_OTHER_PROMPT, message_id=other.id())]
    for task, answer in list(zip(tasks, answers, strict=True))[:-1]:
        messages += [*told_of(task, asks_one(key, task[0][0]), author), author.says(answer)]
    question = asks_one(key, tasks[-1][0][0])
    messages += told_of(tasks[-1], question, author)
    for task, answer in rng.sample(list(zip(tasks, answers, strict=True)), len(tasks)):
        path = task[0][0]
        asked = f"Check {path}." if questions else asks_one(key, path)
        source += [*told_of(task, asked, other), other.says(other.word() if questions else answer)]
    scene = Scene(kind, (Step(tuple(messages)),), told, key, tasks[-1][0][0], question, told, same_answer=True)
    return Moved(scene, tuple(source))


def measure(lab: Lab, stem: str, kind: str, num_scenes: int, seed: int, progress: Progress) -> list[Figure]:
    """Figures of one kind. Raises LabError, and a Refusal where the server's bounds are too small."""
    assert lab.layout  # raises where keys can't be turned
    found: list[dict[str, Answer]] = []
    with lab.bench():
        for number in progress(range(num_scenes), kind, num_scenes):
            found.append(answers(lab, make_moved(kind, seed + number), stem))
            lab.clear()
    return figures(kind, found)


def answers(lab: Lab, moved: Moved, stem: str) -> dict[str, Answer]:
    """The scene in all arms."""
    source, _ = _ids(lab, moved.source)
    body, marker = _ids(lab, [message for step in moved.scene.steps for message in step.messages])
    opening, _ = opening_ids(lab, moved.scene, stem)
    ids = [*body, *marker, *opening]
    shared = _registered(lab, source)
    sequences: list[SequenceId] = []
    for arm in ARMS:
        namespace = shared
        if not arm.turned:
            namespace = _registered(lab, source)
            _unturn(lab, namespace, ids)
        first_pass = len(ids) // 3 if arm.split else len(ids)
        sequences.append(lab.open(ids[:first_pass], namespace if arm.reuse.takes else None, arm.reuse))
        if arm.split:
            lab.prefill(sequences[-1])
            lab.engine.append(sequences[-1], ids[first_pass:])
    asked = lab.ask([Question(sequence, ANSWER_TOKENS) for sequence in sequences])
    want = asked[0].logits[:1]
    out = {}
    for arm, listener in zip(ARMS, asked, strict=True):
        assert listener.report is not None
        first, margin, text = heard(lab, listener)
        out[arm.name] = Answer(
            right=tells(moved.scene.told, text),
            first=first,
            margin=margin,
            kl=divergence(want, listener.logits[:1])[0],
            tokens=tuple(listener.tokens),
            hit=listener.report.content_hit,
            computed=listener.report.computed,
        )
    return out


def figures(kind: str, found: Sequence[dict[str, Answer]]) -> list[Figure]:
    """For all scenes, and for those in which F's first token is no near tie."""
    out: list[Figure] = []
    clear = [answers for answers in found if answers[F.name].margin >= CLEAR]
    for case, chosen in ((kind, found), (f"{kind}, margin >= {CLEAR:g}", clear)):
        for arm in chosen[0] if chosen else ():
            own, want = [one[arm] for one in chosen], [one[F.name] for one in chosen]
            same = [a.first == b.first for a, b in zip(own, want, strict=True)]
            prefix = [common_share(a.tokens, b.tokens) for a, b in zip(own, want, strict=True)]
            out += [
                share(BENCH, case, arm, "needle found", [answer.right for answer in own]),
                share(BENCH, case, arm, "first token as F", same),
                spread(BENCH, case, arm, "KL from F", [answer.kl for answer in own], "nats"),
                spread(BENCH, case, arm, "greedy prefix with F", prefix, "share of its tokens"),
                spread(BENCH, case, arm, "content hit", [float(answer.hit) for answer in own], "tokens"),
                spread(BENCH, case, arm, "computed", [float(answer.computed) for answer in own], "tokens"),
            ]
    return out


def _ids(lab: Lab, messages: Sequence[pb.Message]) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and of the marker that opens the answer."""
    conversation, change = Conversation("lab", (READ_FILE,)).append(messages, lab.format)
    _, marker = conversation.begin_turn(lab.format, raw=False)
    return list(change.ids), list(marker)


def _registered(lab: Lab, source: Sequence[int]) -> Namespace:
    """A namespace in which another session has read the source, and is closed."""
    namespace = lab.namespace()
    sequence = lab.open(source, namespace, Reuse(pb.REUSE_REGISTER))
    lab.prefill(sequence)
    lab.close(sequence)
    return namespace


def _unturn(lab: Lab, namespace: Namespace, ids: Sequence[int]) -> None:
    """The books say of the rows that these ids will find that they were written where they will stand. Nobody else may
    hold them."""
    cache = lab.engine.cache
    cache.release_cached(cache.tree.clear())  # there a row's position says where it stands
    for hit in cache.chunks.match(namespace, np.asarray(ids[SINK:-1], np.int32)):
        cache.table.written_at[hit.slots] = np.arange(len(hit.slots)) + SINK + hit.start
        cache.table.context[hit.slots] = 0  # they are exact no more
