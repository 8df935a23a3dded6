"""Random file stems, keys and values, split into a training part and a held-out part that share no word.

The split is a hash of the text, so nothing has to be stored: an evaluation draws only what training never could.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from zlib import crc32

ONSETS = [*"bdfghjklmnprstvwz", "br", "dr", "gr", "kr", "pl", "st", "tr"]
VOWELS = [*"aeiou"]
CODAS = ["", "", "", "", "n", "r", "s", "l", "x", "m"]

REAL_WORDS = (Path(__file__).parent / "words.txt").read_text().split()

UNITS = ["ms", "s", "m", "h", "kb", "mb", "gb"]
EXTENSIONS = [".ini"] * 14 + [".cfg", ".conf", ".txt"]
FOLDERS = ["etc", "conf", "app", "srv", "data", "opt"]


def is_heldout(text: str) -> bool:
    """True for the one eighth of all texts that training never shows as a stem, key or value."""
    return crc32(text.encode()) % 8 == 0


class WordMaker:
    """Draws names and values from one side of the split."""

    def __init__(self, rng: Random, heldout: bool) -> None:
        self.rng = rng
        self.heldout = heldout

    def stem(self) -> str:
        return self._draw(self._any_stem)

    def key(self) -> str:
        return self._draw(self._any_key)

    def value(self) -> str:
        return self._draw(self._any_value)

    def path(self) -> str:
        """A file's path: a stem on this side of the split, mostly `.ini`, now and then in a folder."""
        folder = self.rng.choice(FOLDERS) + "/" if self.rng.random() < 0.08 else ""
        return folder + self.stem() + self.rng.choice(EXTENSIONS)

    def _draw(self, make: Callable[[], str]) -> str:
        while True:
            text = make()
            if is_heldout(text) == self.heldout:
                return text

    def _syllables(self) -> str:
        rng = self.rng
        parts = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.choice((2, 2, 3)))]
        return "".join(parts) + rng.choice(CODAS)

    def _any_stem(self) -> str:
        draw = self.rng.random()
        if draw < 0.35:
            return self.rng.choice(REAL_WORDS)
        if draw < 0.88:
            return self._syllables()
        return f"{self._syllables()}{self.rng.choice('-_')}{self.rng.choice(REAL_WORDS)}"

    def _any_key(self) -> str:
        draw = self.rng.random()
        if draw < 0.45:
            return self.rng.choice(REAL_WORDS)
        if draw < 0.72:
            return self._syllables()
        return f"{self.rng.choice(REAL_WORDS)}_{self.rng.choice(REAL_WORDS)}"

    def _any_value(self) -> str:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.36:
            return self._number(2, 5)
        if draw < 0.54:
            return self._syllables()
        if draw < 0.66:
            return rng.choice(REAL_WORDS)
        if draw < 0.76:
            return f"{self._syllables()}{rng.choice('-_')}{rng.choice(REAL_WORDS)}"
        if draw < 0.83:
            return f"/{rng.choice(('var', 'srv', 'opt', 'tmp'))}/{self._syllables()}"
        if draw < 0.90:
            return self._number(2, 3) + rng.choice(UNITS)
        if draw < 0.94:
            return ".".join(str(rng.randrange(20)) for _ in range(3))
        if draw < 0.97:
            return ".".join(str(rng.randrange(256)) for _ in range(4))
        return "".join(rng.choice("abcdefghkmnprstuvwxyz23456789") for _ in range(rng.randint(4, 6)))

    def _number(self, min_digits: int, max_digits: int) -> str:
        num_digits = self.rng.randint(min_digits, max_digits)
        return str(self.rng.randrange(10 ** (num_digits - 1), 10**num_digits))
