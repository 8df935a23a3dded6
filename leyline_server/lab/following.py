"""Measure: whom does an edited session follow, the one that still has everything (F) or the one that never had it (R)?

Of every scene and arm: the first token of the answer and its logits, the greedy answer, and whether the answer is the
one that was told. First tokens are digits or letters of a drawn value, never a blank that all arms share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from leyline_server.lab.arms import ARMS, REPAIRS, Arm, F, L, Played, R, opening_ids, play, question
from leyline_server.lab.figures import Figure, share, spread
from leyline_server.lab.laboratory import Lab, LabError
from leyline_server.lab.recording import divergence
from leyline_server.lab.scenes import KINDS, Scene, make_scene
from leyline_server.lab.statistics import wilson

BENCH: Final = "fidelity"
ANSWER_TOKENS: Final = 12
CLEAR: Final = 2.0
"""A margin between the two likeliest tokens, in logits, from which on a first token is no near tie."""
HIDING: Final = ("removed", "outdated", "pointer removed", "8 edits")
"""Kinds in which what was told is gone: nothing that stands in the text says it."""
Progress = Callable[[Iterable[int], str, int], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer in one scene. KL in nats, from F's and R's next-token distribution to this arm's."""

    arm: str
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
    scene: Scene
    answers: dict[str, Answer]


def answers(lab: Lab, scene: Scene, arms: Sequence[Arm] = ARMS) -> SceneResult:
    """The scene in all arms, F and R among them. Raises LabError when its first token says nothing."""
    opening, told = opening_ids(lab, scene)
    if not lab.format.decode(told[:1]).strip():
        raise LabError(f"the answer {scene.told!r} begins with a blank token, on which all arms would agree")
    played = play(lab, scene, arms)
    for one in played:
        one.ask(opening)
    asked = lab.ask([question(one, ANSWER_TOKENS) for one in played])
    logits = {one.arm.name: listener.logits[:1] for one, listener in zip(played, asked, strict=True)}
    found = {}
    for one, listener in zip(played, asked, strict=True):
        row = logits[one.arm.name]
        top = row[0].topk(2).values
        text = _said(lab, listener.tokens)
        found[one.arm.name] = Answer(
            arm=one.arm.name,
            first=int(row[0].argmax()),
            margin=float(top[0] - top[1]),
            kl_from_f=divergence(logits[F.name], row)[0],
            kl_from_r=divergence(logits[R.name], row)[0],
            tokens=tuple(listener.tokens),
            text=text,
            tells=_tells(scene.told, text),
            tells_instead=bool(scene.instead) and _tells(scene.instead, text),
            computed=one.computed,
        )
    _close(lab, played)
    return SceneResult(scene, found)


def measure(lab: Lab, kinds: Sequence[str], num_scenes: int, seed: int, progress: Progress) -> list[SceneResult]:
    results = []
    with lab.bench():
        for kind in kinds:
            for number in progress(range(num_scenes), kind, num_scenes):
                results.append(answers(lab, make_scene(kind, seed + number)))
                lab.clear()
    return results


def told_apart(lab: Lab, kinds: Sequence[str], num_scenes: int, seed: int, progress: Progress) -> list[Figure]:
    """Same tokens, other cache: two sessions were told different values, which then were removed, so that their tokens
    are equal. How often do the logits show which was told? 0.5 is a coin."""
    arms = (R, L, *REPAIRS)
    figures = []
    with lab.bench():
        for kind in kinds:
            wins: dict[str, list[float]] = {arm.name: [] for arm in arms}
            for number in progress(range(num_scenes), f"{kind}, told apart", num_scenes):
                scenes = [make_scene(kind, seed + number, variant) for variant in (0, 1)]
                for arm, win in leanings_decide(lab, scenes, arms).items():
                    wins[arm].append(win)
                lab.clear()
            for name, won in wins.items():
                right = sum(won) / len(won)
                low, high = wilson(round(sum(won)), len(won))
                figures.append(Figure(BENCH, kind, name, "told apart", right, "share", len(won), low, high))
    return figures


def leanings_decide(lab: Lab, scenes: Sequence[Scene], arms: Sequence[Arm]) -> dict[str, float]:
    """1 where the first token of the told value is likelier, against the other's, in the session that was told it."""
    opening, _ = opening_ids(lab, scenes[0])
    firsts = [opening_ids(lab, scene)[1][0] for scene in scenes]
    leans: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for scene in scenes:
        played = play(lab, scene, arms)
        for one in played:
            one.ask(opening)
        for one, listener in zip(played, lab.ask([question(one, 1) for one in played]), strict=True):
            row = listener.logits[0].double()
            leans[one.arm.name].append(float(row[firsts[0]] - row[firsts[1]]))
    return {name: 0.5 if abs(lean[0] - lean[1]) < _TIE else float(lean[0] > lean[1]) for name, lean in leans.items()}


_TIE: Final = 1e-4  # two sums of the same numbers in another order differ by as much


def figures(results: Sequence[SceneResult]) -> list[Figure]:
    """What the results say, kind by kind and arm by arm; once for all scenes, once for those without a near tie."""
    out: list[Figure] = []
    for kind in KINDS:
        own = [result for result in results if result.scene.kind == kind]
        if not own:
            continue
        clear = [r for r in own if min(r.answers[F.name].margin, r.answers[R.name].margin) >= CLEAR]
        for arm in own[0].answers:
            out += _of_arm(kind, arm, own)
            if clear:
                out += _first_tokens(f"{kind}, margin >= {CLEAR:g}", arm, clear)
    return out


def _first_tokens(case: str, arm: str, results: Sequence[SceneResult]) -> list[Figure]:
    """Agreement of first tokens; where F's and R's differ, whom the arm follows."""
    out = [
        share(
            BENCH,
            case,
            arm,
            f"first token as {other}",
            [r.answers[arm].first == r.answers[other].first for r in results],
        )
        for other in (F.name, R.name)
    ]
    differ = [r for r in results if r.answers[F.name].first != r.answers[R.name].first]
    for other in (F.name, R.name) if differ else ():
        follows = [r.answers[arm].first == r.answers[other].first for r in differ]
        out.append(share(BENCH, case, arm, f"follows {other}, where F and R differ", follows))
    return out


def _of_arm(kind: str, arm: str, results: Sequence[SceneResult]) -> list[Figure]:
    own = [r.answers[arm] for r in results]
    out = _first_tokens(kind, arm, results)
    out.append(share(BENCH, kind, arm, "tells what was removed", [answer.tells for answer in own]))
    if results[0].scene.instead:
        out.append(share(BENCH, kind, arm, "tells what stands there", [answer.tells_instead for answer in own]))
    out.append(spread(BENCH, kind, arm, "KL from F", [answer.kl_from_f for answer in own], "nats"))
    out.append(spread(BENCH, kind, arm, "KL from R", [answer.kl_from_r for answer in own], "nats"))
    for other in (F.name, R.name):
        same = [_common(r.answers[arm].tokens, r.answers[other].tokens) for r in results]
        out.append(spread(BENCH, kind, arm, f"greedy prefix with {other}", same, "share of its tokens"))
    out.append(spread(BENCH, kind, arm, "computed again", [float(answer.computed) for answer in own], "tokens"))
    return out


def _common(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """The share of the reference's tokens that stand in front of the first difference."""
    same = next((at for at, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)
    return (min(len(tokens), len(reference)) if same is None else same) / max(1, len(reference))


def _said(lab: Lab, tokens: Sequence[int]) -> str:
    return lab.format.decode([token for token in tokens if token not in lab.format.stop_ids])


def _tells(value: str, text: str) -> bool:
    """Whether an answer gives this value: whole, and first of all."""
    return text.strip().startswith(value) and not text.strip()[len(value) :][:1].isalnum()


def _close(lab: Lab, played: Sequence[Played]) -> None:
    for one in played:
        lab.close(one.sequence)
