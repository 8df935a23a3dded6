"""Training rows: endless sessions, half of them with an edited history, cut to a length.

A row is one session from its first token on, so every row also holds all shorter sessions as its beginnings.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from training.histories import edit_history
from training.render import BOS, CONTEXT, READ_FILE, SYSTEM_PROMPT, Message, encode
from training.tasks import KINDS, SessionMaker
from training.transcripts import transcript

OTHER_PROMPTS = [
    "You answer questions about files.",
    "You are an agent that reads files. Answer with the value alone.",
    "Read files with read_file, then answer.",
    "You are a helpful assistant.",
    "",
]
EDITED_SHARE = 0.5
TOKENS_PER_EDITED_TASK = 50


@dataclass(frozen=True)
class Shape:
    """The shape of a batch, and whether its files are short and its histories whole."""

    num_rows: int
    length: int
    easy: bool = False


def random_prompt(rng: Random) -> tuple[str, list[dict[str, Any]]]:
    """A system prompt and the tools that follow it, mostly the usual ones."""
    prompt = SYSTEM_PROMPT if rng.random() < 0.88 else rng.choice(OTHER_PROMPTS)
    return prompt, [READ_FILE] if rng.random() < 0.97 else []


def make_row(
    rng: Random, tokenizer: Tokenizer, shape: Shape, kinds: tuple[str, ...] = KINDS
) -> tuple[list[int], list[int]]:
    """Ids and loss classes of one session, exactly `shape.length` long."""
    maker = SessionMaker(rng, heldout=False, easy=shape.easy, kinds=kinds)
    disk: dict[str, str] = {}
    prompt, tools = random_prompt(rng)
    messages = [Message("system", prompt)]
    if not shape.easy and rng.random() < EDITED_SHARE:
        num_tasks = rng.randint(2, shape.length // TOKENS_PER_EDITED_TASK)
        history = [message for _ in range(num_tasks) for message in transcript(maker.next_task(), disk)]
        messages += edit_history(history, rng)
    ids, classes = encode(messages, tokenizer, tools)
    ids, classes = [BOS, *ids], [CONTEXT, *classes]
    while len(ids) < shape.length:
        more_ids, more_classes = encode(transcript(maker.next_task(), disk), tokenizer, tools)
        ids += more_ids
        classes += more_classes
    return ids[: shape.length], classes[: shape.length]
