"""Training rows: endless sessions, half of them with an edited history, cut to a length; and batches of them.

A row is one session from its first token on, so every row also holds all shorter sessions as its beginnings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from training.histories import edit_history
from training.render import BOS, CONTEXT, READ_FILE, SYSTEM_PROMPT, Message, encode
from training.tasks import SessionMaker
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


def make_row(rng: Random, tokenizer: Tokenizer, shape: Shape) -> tuple[list[int], list[int]]:
    """Ids and loss classes of one session, exactly `shape.length` long."""
    maker = SessionMaker(rng, heldout=False, easy=shape.easy)
    disk: dict[str, str] = {}
    prompt = SYSTEM_PROMPT if rng.random() < 0.88 else rng.choice(OTHER_PROMPTS)
    tools = [READ_FILE] if rng.random() < 0.97 else []
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


class Batches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches `ids [num_rows, length] int64, classes [num_rows, length] uint8`, different in every worker."""

    def __init__(self, tokenizer_path: str, shape: Shape, seed: int) -> None:
        self.tokenizer_path = tokenizer_path
        self.shape = shape
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        rng = Random(f"{self.seed}/{self.shape}/{worker.id if worker else 0}")
        tokenizer = Tokenizer.from_file(self.tokenizer_path)
        while True:
            rows = [make_row(rng, tokenizer, self.shape) for _ in range(self.shape.num_rows)]
            ids, classes = zip(*rows, strict=True)
            yield (
                torch.from_numpy(np.array(ids, dtype=np.int64)),
                torch.from_numpy(np.array(classes, dtype=np.uint8)),
            )
