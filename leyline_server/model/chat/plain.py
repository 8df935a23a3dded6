"""The format of a checkpoint whose chat format is not known: text and ids without roles, everything else refused."""

from __future__ import annotations

from collections.abc import Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ParsedBody, Rendered
from leyline_proto.refusal import Refusal
from leyline_proto.spans import TEXT, Part
from leyline_server.model.chat.parse import StreamDelta
from leyline_server.model.tokenizer import TextTokenizer


class PlainFormat:
    """`reason` says why messages are refused."""

    name = "plain"

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, reason: str, stop_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self.reason = reason
        self.differences: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def longest_token(self) -> int:
        return self._tokenizer.longest_token

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    @property
    def lacking(self) -> dict[str, str]:
        return dict.fromkeys(("MESSAGES", "TOOLS", "REASONING"), self.reason)

    def render(self, message: pb.Message, call_ids: Sequence[str], tools: Sequence[pb.Tool], first: bool) -> Rendered:
        raise self._refusal()

    def open_assistant(self, first: bool) -> Rendered:
        raise self._refusal()

    def close_assistant(self, parts: Sequence[Part] = ()) -> Rendered:
        raise self._refusal()

    def parse(self, ids: Sequence[int]) -> ParsedBody:
        closed = bool(ids) and ids[-1] in self._stop_ids
        return ParsedBody(self.decode(ids), "", (Part(TEXT, len(ids)),), (), closed)

    def stream(self) -> PlainStream:
        return PlainStream(self._tokenizer)

    def content(self, role: pb.Role.ValueType, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def lead(self, role: pb.Role.ValueType) -> str:
        return ""

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _refusal(self) -> Refusal:
        return Refusal(
            "NOT_SUPPORTED",
            f"this model takes text and token ids only: {self.reason}",
            feature="MESSAGES",
            why=self.reason,
        )


class PlainStream:
    """Reads ids without roles while they are generated: everything is text. One body, one thread."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()

    def push(self, token_id: int) -> StreamDelta:
        return StreamDelta(text=self._detokenizer.push(token_id))

    def flush(self) -> StreamDelta:
        return StreamDelta(text=self._detokenizer.flush())
