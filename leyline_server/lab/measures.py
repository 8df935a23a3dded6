"""One run of the lab: its measures in parts, one after another. A part that fails is skipped, and the others stay.

Owns their order, and which failures end a part and which the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import monotonic

import torch

from leyline_proto.refusal import Refusal
from leyline_server.lab import content, following
from leyline_server.lab.config import LabConfig, Measure
from leyline_server.lab.drift import drift
from leyline_server.lab.figures import Figure
from leyline_server.lab.invariance import invariance
from leyline_server.lab.laboratory import Lab, LabError
from leyline_server.lab.scenes import CONTEXTS, text

_TEXT = 128  # tokens of each text behind CONTEXTS
_DRIFTING = 800  # tokens of the text whose front is edited


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured at once. `detail`: a kind and its scenes, or nothing."""

    measure: Measure
    detail: str
    run: Callable[[], list[Figure]]

    @property
    def name(self) -> str:
        return f"{self.measure}: {self.detail}" if self.detail else self.measure


def parts(config: LabConfig, lab: Lab, max_context: int, progress: following.Progress) -> list[Part]:
    """What the settings ask for, in this order."""
    out: list[Part] = []
    kinds = list(dict.fromkeys(config.kinds))
    count = f"{config.scenes} scene{'s' * (config.scenes > 1)}"

    stem = cache(partial(following.choose_stem, lab))  # asked for by each part, and tried once

    def of_kind(kind: str) -> list[Figure]:
        return following.figures(following.measure(lab, stem(), [kind], config.scenes, config.seed, progress))

    def apart(kind: str) -> list[Figure]:
        return following.told_apart(lab, stem(), [kind], config.scenes, config.seed, progress)

    def moved(kind: str) -> list[Figure]:
        return content.measure(lab, stem(), kind, config.scenes, config.seed, progress)

    def ids(seed: int, num_tokens: int) -> list[int]:
        return lab.format.encode(text(seed, num_tokens))[:num_tokens]

    def drifting() -> list[Figure]:
        return drift(lab, ids(config.seed, _DRIFTING), seed=config.seed)

    def alike() -> list[Figure]:
        if max(CONTEXTS) + _TEXT > max_context:
            asked = f"{_TEXT} tokens behind {max(CONTEXTS)} others"
            raise LabError(f"{asked} are beyond the context of {max_context}")
        texts = [ids(config.seed + 1 + number, _TEXT) for number in range(8)]
        contexts = [ids(config.seed + 100 + number, num_tokens) for number, num_tokens in enumerate(CONTEXTS)]
        return invariance(lab, texts, contexts, config.seed)

    def watched(name: str, make: Callable[[], list[Figure]]) -> list[Figure]:
        return [figure for _ in progress(range(1), name, 1) for figure in make()]

    def hides_nothing() -> list[Figure]:
        raise LabError(f"it needs one of the kinds {', '.join(following.HIDING)}")

    if "fidelity" in config.measures:
        out += [Part("fidelity", f"{kind}, {count}", partial(of_kind, kind)) for kind in kinds]
    if "told-apart" in config.measures:
        hiding = [kind for kind in following.HIDING if kind in kinds]
        out += [Part("told-apart", f"{kind}, {count}", partial(apart, kind)) for kind in hiding]
        if not hiding:
            out.append(Part("told-apart", "", hides_nothing))
    if "content" in config.measures:
        out += [Part("content", f"{kind}, {count}", partial(moved, kind)) for kind in content.KINDS]
    if "drift" in config.measures:
        out.append(Part("drift", "", partial(watched, "drift", drifting)))
    if "invariance" in config.measures:
        out.append(Part("invariance", "", partial(watched, "invariance", alike)))
    return out


def run(chosen: Sequence[Part], tell: Callable[[str], None], skip: Callable[[str], None]) -> Iterator[list[Figure]]:
    """The figures of each part that could be measured. `tell` hears of each, `skip` of the others and why."""
    impossible: set[Measure] = set()
    for part in chosen:
        if part.measure in impossible:
            continue
        began, name = monotonic(), part.name
        try:
            figures = part.run()
        except (Refusal, LabError, torch.OutOfMemoryError, ValueError) as error:
            if isinstance(error, ValueError) and part.measure not in ("drift", "invariance"):
                raise  # these alone say so what is too short for them
            if isinstance(error, Refusal) and error.reason == "NOT_SUPPORTED":
                impossible.add(part.measure)  # what a chat format can't say in one scene it can't in any
                name = part.measure
            why = f"the device has too little memory: {error}" if isinstance(error, torch.OutOfMemoryError) else error
            skip(f"{name}: {why}")
        else:
            tell(f"{name} ({monotonic() - began:.0f} s)")
            yield figures
            continue
        torch.cuda.empty_cache()  # once the failure, and what it held, is gone
