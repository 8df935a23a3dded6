"""Random file stems, keys and values, split into a training part and a held-out part that share no word.

The split is a hash of the text, so nothing has to be stored: an evaluation draws only what training can never have drawn.
"""

from random import Random
from zlib import crc32

ONSETS = "b d f g h j k l m n p r s t v w z br dr gr kr pl st tr".split()
VOWELS = "a e i o u".split()
CODAS = ["", "", "", "", "n", "r", "s", "l", "x", "m"]

REAL_WORDS = """
access action active agent alarm alias alpha api app archive area audio auth author auto backend backup band base batch beacon
beta bind block board body boot border box branch bridge broker browser bucket budget buffer build bus button cache camera
canvas cap card cell chain channel chart check city class client clock cloud cluster code codec color column command
compress config connect console contact content control cookie copy core count country crash cron cursor cycle daemon
data database date day debug deck default delay delta demo deploy depth desk device dialog digest dir disk display dns
domain door draft driver dump edge editor email encoder engine env epoch error event expire export factor fan feed fetch
field file filter firewall flag flow folder font form format forum frame gain gamma garden gate gateway glyph grid
group guard guest handler hash header heap height help home host hour house icon idle image import index info
input interval job journal kernel key label lamp lang language latency layer layout lease length level library license
limit line link list loader local lock log logger login loop machine mail main map mask master max media member
memory menu metric mirror mode model module monitor motor mount name net network node note notify number offset
order origin output owner pack page pair panel parser password patch path peer period phase photo pin pipe plan
player plugin point policy poll pool port power prefix price print priority profile project prompt proxy queue quota
radio range rate ratio reader record redis region relay remote render replica report retry rib role room root route router
rule sample scale scan scene schema score screen script search seat secret sector seed sensor server service session
shade shard share shell shop shift signal site size slot socket source space speed stage state station status step
storage store stream style suffix sync system table tag target task team temp test theme thread throttle tick ticket
time timeout title token tool topic trace track train tree trigger tunnel type unit update upload url user
vault vector version video view volume wallet watch web weight wheel width window worker zone
fast slow red green blue high low strict loose warm cold dark light round flat quiet loud small large deep plain north south
""".split()

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

    def _draw(self, make) -> str:
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
