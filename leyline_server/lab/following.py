"""Measure: whom does an edited session follow, the one that still has everything (F) or the one that never had it (R)?

Of every scene and arm: the first token of the answer with its logits, and the greedy answer. The answer is opened for
the model, up to the first token in which answers differ. Scenes that the model can't answer unedited say nothing of
edits and are left out; figures have the number of those that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from leyline_server.lab.arms import ARMS, REPAIRS, STEMS, Arm, F, L, R, opening_ids, play
from leyline_server.lab.figures import Figure, share, spread
from leyline_server.lab.laboratory import Lab, LabError, Question
from leyline_server.lab.recording import Asked, divergence
from leyline_server.lab.scenes import Scene, make_scene
from leyline_server.lab.statistics import wilson

BENCH: Final = "fidelity"
ANSWER_TOKENS: Final = 12
CLEAR: Final = 2.0
"""A margin between the two likeliest tokens, in logits, from which on a first token is no near tie."""
HIDING: Final = ("removed", "removed later", "outdated", "pointer removed", "removed (8 edits)")
"""Kinds in which what was told is gone: nothing that stands in the text says it."""
TRIED: Final = 8  # scenes in which each stem is tried
LEAST_RIGHT: Final = 0.5
Progress = Callable[[Iterable[int], str, int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer in one scene. KL in nats, from F's and R's next-token distribution to this arm's."""

    first: int
    margin: float
    kl_from_f: float
    kl_from_r: float
    tokens: tuple[int, ...]
    text: str
    tells: bool  # it is what only the removed result said
    tells_instead: bool  # it is what stands there now
    computed: int


@dataclass(frozen=True, slots=True)
class SceneResult:
    """`answered`: whether the unedited session gives the right answer. By the arm's name."""

    scene: Scene
    answered: bool
    answers: dict[str, Answer]


def choose_stem(lab: Lab) -> str:
    """The way to begin an answer with which the model answers unedited scenes best. Raises LabError when it answers
    fewer than half of them: then there is nothing to be said of edits."""
    right = dict.fromkeys(STEMS, 0)
    with lab.bench():
        for seed in range(TRIED):
            scene = make_scene("removed", 10_000 + seed)
            for stem in STEMS:
                opening, told = opening_ids(lab, scene, stem)
                (one,) = play(lab, scene, (F,))
                one.ask(opening)
                right[stem] += lab.ask([Question(one.sequence)])[0].tokens[0] == told[0]
                lab.clear()
    stem = max(STEMS, key=lambda one: right[one])
    if right[stem] < LEAST_RIGHT * TRIED:
        raise LabError(
            f"the model answers {right[stem]} of {TRIED} questions about files that it has just read, nothing edited: "
            "its answers can't show what edits do"
        )
    return stem


def heard(lab: Lab, listener: Asked) -> tuple[int, float, str]:
    """Of an answer: its likeliest first token, by how much before the next, and its text."""
    first, second = listener.logits[0].topk(2).values
    text = lab.format.decode([token for token in listener.tokens if token not in lab.format.stop_ids])
    return int(listener.logits[0].argmax()), float(first - second), text


def answers(lab: Lab, scene: Scene, stem: str, arms: Sequence[Arm] = ARMS) -> SceneResult:
    """The scene in all arms, F and R among them."""
    opening, _ = opening_ids(lab, scene, stem)
    played = play(lab, scene, arms)
    for one in played:
        one.ask(opening)
    asked = lab.ask([Question(one.sequence, ANSWER_TOKENS) for one in played])
    logits = {one.arm.name: listener.logits[:1] for one, listener in zip(played, asked, strict=True)}
    found = {}
    for one, listener in zip(played, asked, strict=True):
        row = logits[one.arm.name]
        first, margin, text = heard(lab, listener)
        found[one.arm.name] = Answer(
            first=first,
            margin=margin,
            kl_from_f=divergence(logits[F.name], row)[0],
            kl_from_r=divergence(logits[R.name], row)[0],
            tokens=tuple(listener.tokens),
            text=text,
            tells=tells(scene.told, text),
            tells_instead=bool(scene.instead) and tells(scene.instead, text),
            computed=one.computed,
        )
    for one in played:
        lab.close(one.sequence)
    return SceneResult(scene, found[F.name].tells, found)


def measure(
    lab: Lab, stem: str, kinds: Sequence[str], num_scenes: int, seed: int, progress: Progress
) -> list[SceneResult]:
    """Raises LabError."""
    results = []
    with lab.bench():
        for kind in kinds:
            for number in progress(range(num_scenes), kind, num_scenes):
                results.append(answers(lab, make_scene(kind, seed + number), stem))
                lab.clear()
    return results


def told_apart(
    lab: Lab, stem: str, kinds: Sequence[str], num_scenes: int, seed: int, progress: Progress
) -> list[Figure]:
    """Same tokens, other cache: two sessions were told different values, which then were removed, so that their tokens
    are equal. How often do the logits show which was told? 0.5 is a coin. Raises LabError."""
    arms = (R, L, *REPAIRS)
    figures = []
    with lab.bench():
        for kind in kinds:
            wins: dict[str, list[float]] = {arm.name: [] for arm in arms}
            for number in progress(range(num_scenes), f"{kind}, told apart", num_scenes):
                scenes = [make_scene(kind, seed + number, variant) for variant in (0, 1)]
                for arm, win in which_was_told(lab, scenes, stem, arms).items():
                    wins[arm].append(win)
                lab.clear()
            for name, won in wins.items():
                if won:
                    value, (low, high) = sum(won) / len(won), wilson(sum(won), len(won))
                    figures.append(Figure(BENCH, kind, name, "told apart", value, "share", len(won), low, high))
    return figures


def which_was_told(lab: Lab, scenes: Sequence[Scene], stem: str, arms: Sequence[Arm]) -> dict[str, float]:
    """For each arm, R among them: 1 where each session leans to the value that it was told, 0 where to the other's.

    0.5 where neither leans farther than R's two sessions, which differ in nothing, do by rounding. Empty where the
    tokenizer begins both values alike.
    """
    opening, _ = opening_ids(lab, scenes[0], stem)
    firsts = [opening_ids(lab, scene, stem)[1][0] for scene in scenes]
    if firsts[0] == firsts[1]:
        return {}
    rows: list[dict[str, Tensor]] = []
    for scene in scenes:
        played = play(lab, scene, arms)
        for one in played:
            one.ask(opening)
        asked = lab.ask([Question(one.sequence) for one in played])
        rows.append({one.arm.name: listener.logits[0] for one, listener in zip(played, asked, strict=True)})
    apart = {}
    for arm in arms:
        leans = [float(row[arm.name][firsts[0]] - row[arm.name][firsts[1]]) for row in rows]
        apart[arm.name] = leans[0] - leans[1]
    noise = max(_ROUNDING, 4 * abs(apart[R.name]))
    return {name: 0.5 if abs(by) <= noise else float(by > 0) for name, by in apart.items()}


_ROUNDING: Final = 1e-4


def figures(results: Sequence[SceneResult]) -> list[Figure]:
    """What the results say, kind by kind and arm by arm; once for all scenes that the model answers unedited, once for
    those of them without a near tie."""
    out: list[Figure] = []
    for kind in dict.fromkeys(result.scene.kind for result in results):
        every = [result for result in results if result.scene.kind == kind]
        out.append(share(BENCH, kind, F.name, "answers unedited", [result.answered for result in every]))
        own = [result for result in every if result.answered]
        clear = [r for r in own if min(r.answers[F.name].margin, r.answers[R.name].margin) >= CLEAR]
        for case, chosen in ((kind, own), (f"{kind}, margin >= {CLEAR:g}", clear)):
            for arm in chosen[0].answers if chosen else ():
                out += _of_arm(case, arm, chosen)
    return out


def _of_arm(case: str, arm: str, results: Sequence[SceneResult]) -> list[Figure]:
    """Agreement of first tokens and, where F's and R's differ, whom the arm follows; what it tells; how far it is."""
    own = [r.answers[arm] for r in results]
    references = {other: [r.answers[other] for r in results] for other in (F.name, R.name)}
    out = []
    for other, answered in references.items():
        same = [one.first == two.first for one, two in zip(own, answered, strict=True)]
        out.append(share(BENCH, case, arm, f"first token as {other}", same))
    differ = [f.first != r.first for f, r in zip(references[F.name], references[R.name], strict=True)]
    for other, answered in references.items():
        follows = [one.first == two.first for one, two, d in zip(own, answered, differ, strict=True) if d]
        if follows:
            out.append(share(BENCH, case, arm, f"follows {other}, where F and R differ", follows))
    out.append(share(BENCH, case, arm, "tells what was removed", [answer.tells for answer in own]))
    if results[0].scene.instead:
        out.append(share(BENCH, case, arm, "tells what stands there", [answer.tells_instead for answer in own]))
    out.append(spread(BENCH, case, arm, "KL from F", [answer.kl_from_f for answer in own], "nats"))
    out.append(spread(BENCH, case, arm, "KL from R", [answer.kl_from_r for answer in own], "nats"))
    for other, answered in references.items():
        same_tokens = [common_share(one.tokens, two.tokens) for one, two in zip(own, answered, strict=True)]
        out.append(spread(BENCH, case, arm, f"greedy prefix with {other}", same_tokens, "share of its tokens"))
    out.append(spread(BENCH, case, arm, "computed again", [float(answer.computed) for answer in own], "tokens"))
    return out


def common_share(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """The share of the reference's tokens that stand in front of the first difference."""
    same = next((at for at, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
    return (min(len(tokens), len(reference)) if same is None else same) / max(1, len(reference))


def tells(value: str, text: str) -> bool:
    """Whether an answer gives this value, whole and first of all."""
    said = text.strip()
    return said.startswith(value) and not said[len(value) :][:1].isalnum()
