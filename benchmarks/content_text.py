"""Text as agents are given it, from a seed: documents, tool schemas, code, messages, in English-like sentences.

Owns the words. Tool schemas share their JSON, sentences their turns of phrase: short stretches come again everywhere,
as they do in real prompts. Knows no benchmark and no tokenizer; lengths are counted in characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np

CHARACTERS_A_TOKEN: Final = 4.5
"""Of DeepSeek-V3's tokenizer on these texts, roughly."""


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS: Final = _words(
    "account agent answer archive batch board branch budget cache call change client cluster column commit config "
    "contract customer dataset deadline delivery device document driver error event feature field file folder "
    "forecast function gateway graph handler index invoice issue journal kernel key library limit list log "
    "machine manager map market member message meter method migration model module month network node note number "
    "office operator order package page parser partner patch path payment period pipeline plan platform policy "
    "port price process product project protocol queue quota record region release report request response result "
    "review role route row rule sample schedule schema scheduler script section sensor server service session "
    "shipment signal site snapshot source station storage stream supplier table target task team template tenant "
    "test thread ticket token tool trace transfer update user value vendor version volume warehouse window worker"
)
_VERBS: Final = _words(
    "accepts adds allows answers applies blocks builds calls carries changes checks clears closes collects "
    "compares confirms copies covers delays delivers drops exports extends fails fetches fills finds follows "
    "groups handles holds imports joins keeps lists loads locks marks measures merges moves names needs opens "
    "owns parses passes prints publishes pulls pushes queues raises reads rejects reloads removes renames "
    "replaces reports resolves returns reviews rounds routes saves scans sends sorts splits starts stops stores "
    "tracks trims updates uses validates waits warns watches writes"
)
_ADJECTIVES: Final = _words(
    "active annual available broken central cheap clean cold common complete correct current daily dark deep "
    "early empty exact external fast final first flat fresh full general global hidden hot internal large last "
    "late local long main manual missing monthly narrow new nightly old open optional outer partial past plain "
    "primary private public quick quiet rare raw recent remote second secure shared short silent simple single "
    "slow small stable stale static strict temporary thin total unused upper valid weekly whole wide"
)
_NAMES: Final = _words(
    "Alice Boris Chen Dana Emil Fatima Goran Hana Ivan Jun Karim Lena Marta Nils Olga Pedro Rosa Sven"
)
_MONTHS: Final = _words("January February March April May June July August September October November December")
_TYPES: Final = ("string", "integer", "number", "boolean")
_TEMPLATES: Final = (
    "The {adj} {noun} {verb} the {noun} when the {noun} of the {noun} is {adj}.",
    "In {month} the {noun} team counted {number} cases in which a {noun} {verb} its {adj} {noun}.",
    "If a {noun} {verb} more than {number} times, the {noun} has to be {adj} before anyone {verb} it again.",
    "{name} wrote that the {adj} {noun} is not the {noun} that the {noun} {verb}.",
    "Each {noun} {verb} one {noun}, and each {noun} {verb} at most {number}.",
    "For more information about the {noun}, see the section on the {adj} {noun} below.",
    "Compared with the {adj} {noun}, the {noun} {verb} {number} percent more, but only where the {noun} is {adj}.",
    "Note that a {noun} which {verb} the {noun} never {verb} a {adj} one.",
    "What {verb} the {noun} is decided by the {noun}; the {adj} {noun} only {verb} it.",
    "As of {month}, {number} of {number} {noun} entries were {adj}.",
)


class Writer:
    """One stream of text: the same seed writes the same."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, of: tuple[str, ...] | list[str]) -> str:
        return of[int(self.rng.integers(len(of)))]

    def length(self, low: int = 60, high: int = 1500) -> int:
        """In tokens, roughly: as many short ones as long ones, by order of magnitude."""
        return round(float(np.exp(self.rng.uniform(np.log(low), np.log(high)))))

    def sentence(self) -> str:
        out = self.pick(_TEMPLATES)
        makers: dict[str, Callable[[], str]] = {
            "{noun}": lambda: self.pick(_NOUNS),
            "{verb}": lambda: self.pick(_VERBS),
            "{adj}": lambda: self.pick(_ADJECTIVES),
            "{name}": lambda: self.pick(_NAMES),
            "{month}": lambda: self.pick(_MONTHS),
            "{number}": lambda: str(int(self.rng.integers(2, 900))),
        }
        for field, make in makers.items():
            while field in out:
                out = out.replace(field, make(), 1)
        return out

    def prose(self, tokens: int) -> str:
        """Paragraphs of one to six sentences."""
        out, size = list[str](), 0
        while size < tokens * CHARACTERS_A_TOKEN or not out:
            out.append(" ".join(self.sentence() for _ in range(int(self.rng.integers(1, 7)))))
            size += len(out[-1])
        text = "\n\n".join(out)
        return text[: max(20, round(tokens * CHARACTERS_A_TOKEN))].rsplit(" ", 1)[0] + ".\n"

    def identifier(self) -> str:
        return f"{self.pick(_VERBS)[:-1]}_{self.pick(_NOUNS)}"

    def document(self, tokens: int | None = None) -> str:
        """A title, an origin, then prose, with code in one of three."""
        tokens = tokens or self.length()
        title = f"{self.pick(_ADJECTIVES)} {self.pick(_NOUNS)} {self.pick(_NOUNS)}".title()
        head = f"## {title}\nSource: docs/{self.identifier()}.md, {self.date()}\n\n"
        if tokens > 200 and self.rng.random() < 1 / 3:
            return head + self.prose(tokens * 2 // 3) + self.code(tokens // 3)
        return head + self.prose(tokens) + "\n"

    def code(self, tokens: int) -> str:
        lines = [f"```python\nimport {self.pick(_NOUNS)}\n"]
        while sum(map(len, lines)) < tokens * CHARACTERS_A_TOKEN:
            name, first, second = self.identifier(), self.pick(_NOUNS), self.pick(_NOUNS)
            lines.append(f"\n\ndef {name}({first}: str, {second}: int = {self.rng.integers(99)}) -> list[str]:")
            lines.append(f'    """{self.sentence()}"""\n    out = []')
            for _ in range(int(self.rng.integers(1, 5))):
                lines.append(f"    for {self.pick(_NOUNS)} in {self.identifier()}({first}, {second}):")
                lines.append(f"        if {self.pick(_NOUNS)}.{self.pick(_NOUNS)} > {self.rng.integers(999)}:")
                lines.append(f"            out.append({self.identifier()}({second}))")
            lines.append("    return out")
        return "\n".join(lines) + "\n```\n"

    def tool(self, tokens: int | None = None) -> str:
        """One function's schema, as chat templates write it: a line of JSON."""
        tokens = tokens or self.length()
        properties: dict[str, Any] = {}
        schema = {
            "name": f"{self.identifier()}_{self.rng.integers(100)}",
            "description": self.sentence(),
            "parameters": {"type": "object", "properties": properties, "required": list[str]()},
        }
        while True:
            kind = self.pick(_TYPES)
            given: dict[str, Any] = {"type": kind, "description": self.sentence()}
            if kind == "string" and self.rng.random() < 0.3:
                given["enum"] = [self.pick(_ADJECTIVES) for _ in range(3)]
            properties[f"{self.pick(_NOUNS)}_{self.pick(_NOUNS)}"] = given
            schema["parameters"]["required"] = list(properties)[::2]  # type: ignore[index]
            text = json.dumps({"type": "function", "function": schema}) + "\n"
            if len(text) >= tokens * CHARACTERS_A_TOKEN:
                return text

    def date(self) -> str:
        return f"{self.rng.integers(1, 29)} {self.pick(_MONTHS)} {self.rng.integers(2019, 2027)}"

    def name(self) -> str:
        return f"{self.pick(_NAMES)} {self.pick(_NOUNS).title()}"

    def header(self, tokens: int) -> str:
        """Who an agent is: what its prompt begins with."""
        role = f"{self.pick(_ADJECTIVES)} {self.pick(_NOUNS)} agent"
        return f"You are {self.name()}, the {role} of the {self.pick(_NOUNS)} team.\n" + self.prose(tokens)

    def turn(self) -> str:
        """A question, a call, what it returned."""
        call = json.dumps({"name": self.identifier(), "arguments": {self.pick(_NOUNS): self.identifier()}})
        said = f"<|user|>{self.sentence()} {self.sentence()}\n<|assistant|>{self.sentence()}\n{call}\n"
        size = self.length(60, 800)
        output = self.code(size) if self.rng.random() < 0.4 else self.prose(size)
        return f"{said}<|tool|>{output}"
