"""A chat format over bytes: token i < 256 is byte i, the others are markers.

<bos> <user> hello <end> <assistant> <think> hm </think> let me look <call> ls <args> {"path":"."} </call> <end>
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ParsedBody, ParsedCall, Rendered
from leyline_proto.messages import json_object_error
from leyline_proto.refusal import Refusal
from leyline_proto.spans import CALL, MARKER, REASONING, TEXT, Part


class Special(IntEnum):
    """The markers, after the 256 bytes."""

    BOS = 256
    SYSTEM = 257
    USER = 258
    ASSISTANT = 259
    TOOL = 260
    END = 261
    CALL = 262
    ARGS = 263
    END_CALL = 264
    THINK = 265
    END_THINK = 266


_ROLE = {
    pb.ROLE_SYSTEM: Special.SYSTEM,
    pb.ROLE_USER: Special.USER,
    pb.ROLE_ASSISTANT: Special.ASSISTANT,
    pb.ROLE_TOOL: Special.TOOL,
}


class ByteFormat:
    """Implements `leyline_proto.chat_format.ChatFormat`. The tools stand between markers, in no content part."""

    vocab_size = 267
    longest_token = 1
    stop_ids = frozenset({int(Special.END)})

    def render(self, message: pb.Message, call_ids: Sequence[str], tools: Sequence[pb.Tool], first: bool) -> Rendered:
        if message.role not in _ROLE:
            raise Refusal("INVALID_ARGUMENT", "a message needs a role", field="message.role")
        out = _Pieces()
        listing = self.encode("".join(f"{tool.name}{tool.parameters_json}" for tool in tools))
        if first:
            out.add(MARKER, [Special.BOS])
        if tools and message.role != pb.ROLE_SYSTEM:
            out.add(MARKER, [Special.SYSTEM, *listing, Special.END])
            listing = []
        out.add(MARKER, [_ROLE[message.role]])
        if message.reasoning:
            out.add(MARKER, [Special.THINK])
            out.add(REASONING, self.encode(message.reasoning))
            out.add(MARKER, [Special.END_THINK])
        out.add(TEXT, self.encode(message.content))
        for call_id, call in zip(call_ids, message.tool_calls, strict=True):
            out.add(CALL, self.call_ids(call.name, call.arguments_json), call_id)
        out.add(MARKER, [*listing, Special.END])
        return out.rendered()

    def call_ids(self, name: str, arguments_json: str) -> list[int]:
        """One tool call with its delimiters."""
        return [Special.CALL, *self.encode(name), Special.ARGS, *self.encode(arguments_json), Special.END_CALL]

    def open_assistant(self, first: bool) -> Rendered:
        ids = (int(Special.BOS), int(Special.ASSISTANT)) if first else (int(Special.ASSISTANT),)
        return Rendered(ids, (Part(MARKER, len(ids)),))

    def close_assistant(self, parts: Sequence[Part] = ()) -> Rendered:
        return Rendered((int(Special.END),), (Part(MARKER, 1),))

    def parse(self, ids: Sequence[int]) -> ParsedBody:
        parts: list[Part] = []
        calls: list[ParsedCall] = []
        text, reasoning = "", ""
        closed, half = False, 0
        i = 0
        if ids and ids[0] == Special.THINK:
            end = _find(ids, 1, (Special.END_THINK, Special.END))
            parts += [Part(MARKER, 1), Part(REASONING, end - 1)]
            reasoning = self.decode(ids[1:end])
            i = end
            if i < len(ids) and ids[i] == Special.END_THINK:
                parts.append(Part(MARKER, 1))
                i += 1
        if not parts or parts[-1].kind == MARKER:  # a thought without an end has no text: two contents never touch
            end = _find(ids, i, tuple(Special))
            parts.append(Part(TEXT, end - i))
            text = self.decode(ids[i:end])
            i = end
        while i < len(ids):
            if ids[i] == Special.CALL:
                end = _find(ids, i + 1, (Special.END_CALL, Special.END, Special.CALL))
                if end == len(ids):
                    half = end - i
                else:
                    end += ids[end] == Special.END_CALL
                    calls.append(self._parsed_call(ids[i:end]))
                parts.append(Part(CALL, end - i))
            elif ids[i] >= 256:
                end = i + 1
                closed = closed or ids[i] == Special.END
                parts.append(Part(MARKER, 1))
            else:
                end = _find(ids, i, tuple(Special))
                parts.append(Part(TEXT, end - i))
                text += self.decode(ids[i:end])
            i = end
        return ParsedBody(text, reasoning, tuple(parts), tuple(calls), closed, half)

    def _parsed_call(self, ids: Sequence[int]) -> ParsedCall:
        text = self.decode(ids[1:])
        if ids[-1] != Special.END_CALL or Special.ARGS not in ids:
            return ParsedCall("", "", text, "the call has no arguments or no end")
        split = list(ids).index(Special.ARGS)
        name, arguments = self.decode(ids[1:split]), self.decode(ids[split + 1 : -1])
        error = "" if name else "the call has no name"
        return ParsedCall(name, arguments, text, error or json_object_error(arguments))

    def encode(self, text: str) -> list[int]:
        if "\0" in text:
            raise Refusal("INVALID_ARGUMENT", f"text holds NUL at index {text.index(chr(0))}", field="text")
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise Refusal(
                "INVALID_ARGUMENT", f"text holds a lone surrogate at index {error.start}", field="text"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        run = bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
            else:
                out += [run.decode(errors="replace"), f"<|{Special(token).name.lower()}|>"]
                run.clear()
        return "".join([*out, run.decode(errors="replace")])

    def lead(self, role: pb.Role.ValueType) -> str:
        return ""


class _Pieces:
    def __init__(self) -> None:
        self._ids: list[int] = []
        self._parts: list[Part] = []

    def add(self, kind: pb.PartKind.ValueType, ids: Sequence[int], call_id: str = "") -> None:
        self._ids.extend(map(int, ids))
        self._parts.append(Part(kind, len(ids), call_id))

    def rendered(self) -> Rendered:
        return Rendered(tuple(self._ids), tuple(self._parts))


def _find(ids: Sequence[int], start: int, wanted: Sequence[int]) -> int:
    """The first index of one of these from `start` on, or the end."""
    return next((i for i in range(start, len(ids)) if ids[i] in wanted), len(ids))
