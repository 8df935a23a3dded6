"""Text to token ids and back, for a checkpoint's byte-level BPE.

Owns the rule that plain text is plain: no text, whatever it spells, becomes a special token. Decoding goes through a
table of each token's bytes, so that whole sequences and streams give the same characters. Does not know messages.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from leyline_proto.refusal import Refusal

REPLACEMENT: Final = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer.json that can't be served, with the reason."""


class TextTokenizer:
    """A checkpoint's tokenizer. Immutable; any thread may call it.

    Args:
        definition: the text of tokenizer.json.

    Raises:
        TokenizerError: it is no byte-level tokenizer, or no tokenizer at all.
    """

    def __init__(self, definition: str) -> None:
        try:
            parsed: dict[str, Any] = json.loads(definition)
            if "ByteLevel" not in json.dumps(parsed["decoder"]):
                raise TokenizerError("only byte-level tokenizers are supported; this one's decoder is another")
            added = {token["content"]: int(token["id"]) for token in parsed["added_tokens"]}
            vocab: dict[str, int] = {text: i for text, i in parsed["model"]["vocab"].items() if text not in added}
            # Without added tokens nothing is special; without their entries in the vocabulary no merge can reach them.
            plain = {
                **parsed,
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
                "model": {**parsed["model"], "vocab": vocab},
            }
            self._plain = Tokenizer.from_str(json.dumps(plain))
        except TokenizerError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise TokenizerError(f"tokenizer.json can't be read: {error}") from error
        self._definition = definition
        self._added = added
        self._bytes = _bytes_of_tokens(vocab, added)

    @classmethod
    def from_dir(cls, path: str | Path) -> TextTokenizer:
        """The tokenizer of a checkpoint directory. Raises TokenizerError."""
        file = Path(path) / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file} can't be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included. The model's bound may be larger."""
        return len(self._bytes)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._bytes))

    def special_id(self, text: str) -> int | None:
        """The id of an added token, or None when `text` is not one."""
        return self._added.get(text)

    def encode(self, text: str) -> list[int]:
        """Plain text, in which nothing is special, and without any token put in front or behind.

        Raises INVALID_ARGUMENT for lone surrogates and NUL, naming the index.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _bad_character("a lone surrogate", text, error.start) from None
        nul = text.find("\0")
        if nul >= 0:
            raise _bad_character("NUL", text, nul)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """Text whose special tokens are meant, such as what a Jinja template renders. Never for a client's text."""
        ids: list[int] = self._marked.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids: special tokens as they are spelled, U+FFFD for bytes that form no character and for ids
        without a token. Nothing is stripped or cleaned up."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; U+FFFD's for an id without a token."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else REPLACEMENT.encode()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    @cached_property
    def _marked(self) -> Any:
        return Tokenizer.from_str(self._definition)


class Detokenizer:
    """Text of a stream of ids, whole characters only. What it gives, joined, is `decode` of all the ids.

    One stream, one thread.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completed."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The end of the stream: U+FFFD when it ends inside a character. The detokenizer is as new afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _bad_character(what: str, text: str, index: int) -> Refusal:
    return Refusal(
        "INVALID_ARGUMENT",
        f"the text has {what} (U+{ord(text[index]):04X}) at index {index}",
        field="text",
        index=index,
        character=f"U+{ord(text[index]):04X}",
    )


def _bytes_of_tokens(vocab: dict[str, int], added: dict[str, int]) -> list[bytes]:
    byte_of = _byte_alphabet()
    missing = REPLACEMENT.encode()
    table = [missing] * (1 + max([*vocab.values(), *added.values()], default=-1))
    for text, token_id in vocab.items():
        known = all(char in byte_of for char in text)
        table[token_id] = bytes(byte_of[char] for char in text) if known else text.encode()
    for text, token_id in added.items():
        table[token_id] = text.encode()
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte, reversed: printable Latin-1 stands for itself, the rest from U+0100."""
    printable: Iterable[int] = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
