"""What becomes of everything after an edited span: AMORTIZE, FORGET, and repair, the dial between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from leyline_sdk.errors import ConfigError


class Mode(StrEnum):
    """The two ends of the dial."""

    AMORTIZE = "AMORTIZE"  # it keeps its KV and moves
    FORGET = "FORGET"  # it is computed again: nothing in the cache comes from what was cut


@dataclass(frozen=True, slots=True)
class Repair:
    """AMORTIZE, and part of what follows is computed again: `mode=Repair(first=16)` or `mode=Repair(share=0.15)`.

    It costs so many tokens at the next call, a share also a look at what it chooses from, through two layers. Unlike
    FORGET it can be undone, and what the cut text was computed into elsewhere stays there.

    Attributes:
        first: at least 0, the first tokens behind the span (after EPIC).
        share: in (0, 1], of the tokens behind it those whose latents deviate most from what they would be now (after
            CacheBlend); 1 is all of them.

    Neither reaches behind the next span of the same call. As `reuse_repair` of a session it is what of each content hit
    is computed all the same. Raises ConfigError unless one of the two is given, in bounds.
    """

    first: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.first is None) == (self.share is None):
            raise ConfigError(f"{self!r}: say either first or share")
        if self.first is not None and (isinstance(self.first, bool) or not isinstance(self.first, int)):
            raise ConfigError(f"Repair: first={self.first!r} is no whole number")
        if self.first is not None and self.first < 0:
            raise ConfigError(f"Repair: first={self.first} must be at least 0")
        if self.share is not None and not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise ConfigError(f"Repair: share={self.share!r} must be in (0, 1]")


EditMode: TypeAlias = Mode | Repair
"""How an edit is made."""


def check_mode(whose: str, mode: object) -> None:
    """Raises ConfigError for what is no mode."""
    if not isinstance(mode, Repair) and mode not in list(Mode):
        raise ConfigError(f"{whose}: mode={mode!r} is none of {', '.join(Mode)}, and no Repair")


def stronger(one: EditMode, other: EditMode) -> EditMode:
    """The mode that leaves no more of what was cut than either."""
    if Mode.FORGET in (one, other):
        return Mode.FORGET
    repairs = [mode for mode in (one, other) if isinstance(mode, Repair)]
    if len(repairs) < 2:
        return repairs[0] if repairs else Mode.AMORTIZE
    firsts = [repair.first for repair in repairs if repair.first is not None]
    shares = [repair.share for repair in repairs if repair.share is not None]
    if firsts and shares:
        return Repair(share=1.0)  # both are part of it, and of nothing smaller that can be said
    return Repair(first=max(firsts)) if firsts else Repair(share=max(shares))
