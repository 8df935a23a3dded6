"""Makes the tokenizer: byte-level BPE with single digits, learnt from the generator's text and some ordinary English.

A word is never merged with the space before it, so that a key has the same ids in a question and at the start of a
line; only the joints that every task uses (` = `, ` in `, ` is `, ` and `) are one piece with both their spaces.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.histories import CLEARED
from training.render import BOS, END, PAD, READ_FILE, SPECIAL_TOKENS, SYSTEM_PROMPT, compact_json, pieces
from training.rows import OTHER_PROMPTS
from training.tasks import SessionMaker
from training.transcripts import transcript
from training.words import REAL_WORDS

VOCAB_SIZE = 1280
PIECES = r" (?:=|in|is|and) |\p{N}|\p{L}+|\n| |[^\p{L}\p{N}\s]+|\s"

ENGLISH = """
The quick brown fox jumps over the lazy dog. This file was written by hand and can be changed at any time. Set
the value to true or false, yes or no, on or off. You can read more about the options in the manual; each of
them has a name, a type and a default. If the server does not start, look at the log first: it says which port
is in use and why. Please do not edit the lines below unless you know what they do. There are three ways to
make it work, but only one of them is right. We thank everyone who has helped with this project. How many
files are there? Who wrote them, when, and where should they go? Nothing was found, so try again later or ask
someone else.
error: permission denied. error: no such file or directory. warning: unknown option ignored.
{"id": 1, "items": [], "ok": null}
"""


def corpus(num_sessions: int = 3000) -> Iterator[str]:
    """The texts between special tokens of random training sessions, and a little of everything else."""
    yield from [ENGLISH, *OTHER_PROMPTS, CLEARED, " ".join(REAL_WORDS)] * 20
    yield from [SYSTEM_PROMPT, compact_json(READ_FILE, sort_keys=True)] * 200
    for seed in range(num_sessions):
        maker = SessionMaker(Random(seed), heldout=False)
        disk: dict[str, str] = {}
        for _ in range(6):
            for message in transcript(maker.next_task(), disk):
                yield from (piece for piece in pieces(message, []) if isinstance(piece, str))


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def save_tokenizer(out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the chat template in it."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(),
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[END],
        additional_special_tokens=SPECIAL_TOKENS[2:END] + SPECIAL_TOKENS[END + 1 :],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    wrapped.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    wrapped.save_pretrained(out, save_jinja_files=False)
