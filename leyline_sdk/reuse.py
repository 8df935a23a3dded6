"""What a session reuses of what the server holds, and how texts are put together so that it is found.

Owns `Reuse`, its check, and `assemble`: no calls. `warming` computes documents ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from leyline_sdk.errors import ConfigError
from leyline_sdk.mode import Repair


class Reuse(StrEnum):
    """What a session takes from the server's caches, beside its own rows, and leaves there. Never another tenant's."""

    PREFIX = "PREFIX"  # rows of the same text from its beginning on: exact
    REGISTER = "REGISTER"  # as PREFIX; its own exact rows can be found by their content
    CONTENT = "CONTENT"  # as REGISTER; it takes rows of the same content that stood elsewhere: approximate


def check_reuse(reuse: object, repair: object, least_share: object) -> None:
    """Raises ConfigError for what is no Reuse, and for a repair or a share of what is never hit. None: not said, as for
    a session that is resumed."""
    if reuse is not None and reuse not in list(Reuse):
        raise ConfigError(f"reuse={reuse!r} is none of {', '.join(Reuse)}")
    if repair is not None and not isinstance(repair, Repair):
        raise ConfigError(f"reuse_repair={repair!r} is no Repair")
    if least_share is not None and (
        isinstance(least_share, bool) or not isinstance(least_share, int | float) or not 0 <= least_share <= 1
    ):
        raise ConfigError(f"reuse_least_share={least_share!r} is no number in [0, 1]")
    for name, value in (("reuse_repair", repair), ("reuse_least_share", least_share)):
        if value is not None and reuse not in (None, Reuse.CONTENT):
            raise ConfigError(f"{name} is for reuse=Reuse.CONTENT: it is of content hits")


def assemble(parts: Sequence[str], *, separator: str = "\n\n", marker: str = "") -> str:
    """Documents as one text in which each is tokenised alike wherever it stands, so that `Reuse.CONTENT` finds all of
    it: outer white space goes, and between two stands a separator that tokenizers split at.

    What follows the last document stands behind a separator too, e.g. as a last part: the tokens of a part's end may
    depend on whether one follows.

    Args:
        parts: in the order in which they are to stand.
        separator: between two parts, not empty. A blank line is a boundary of the tokenizers of DeepSeek's kind.
        marker: in front of each part, e.g. "### Document\\n"; it should end in a line's end. The server finds content
            without one.

    Raises:
        ConfigError: a part is no text, or nothing but white space, which is found nowhere; the separator or the marker
            is none.
    """
    if not isinstance(separator, str) or not separator:
        raise ConfigError(f"separator={separator!r} is no text: parts that touch are tokenised as one")
    if not isinstance(marker, str):
        raise ConfigError(f"marker={marker!r} is no text")
    if isinstance(parts, str) or not isinstance(parts, Sequence):
        raise ConfigError(f"parts are a list of texts, not a {type(parts).__name__}")
    for index, part in enumerate(parts):
        if not isinstance(part, str):
            raise ConfigError(f"part {index} is a {type(part).__name__}, not a str")
        if not part.strip():
            raise ConfigError(f"part {index} is empty")
    return separator.join(f"{marker}{part.strip()}" for part in parts)
