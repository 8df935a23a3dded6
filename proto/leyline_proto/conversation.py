"""A session as its client sees it: messages, tools, version, edits. An immutable value.

Owns the rules of appending, generating, editing and undoing, in terms of token counts. Each operation
returns the next value together with what has to happen to the token list; whoever keeps the list does that
and assigns the value, or does neither. It does not know KV, slots or threads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import ChatFormat, ParsedBody
from leyline_proto.directives import Cut, check_vocabulary
from leyline_proto.edit_log import EditLog, EditRecord
from leyline_proto.once import check_id
from leyline_proto.refusal import Refusal
from leyline_proto.spans import CALL, TEXT, Call, MessageEntry, Part, Piece, SpanTable, check_pairs

_TOOL, _ASSISTANT = pb.ROLE_TOOL, pb.ROLE_ASSISTANT


@dataclass(frozen=True, slots=True)
class TailChange:
    """What an append does to the token list: `drop` tokens go from its end, then `ids` come."""

    ids: tuple[int, ...]
    entries: tuple[MessageEntry, ...] = ()
    drop: int = 0
    dropped_text: str = ""


@dataclass(frozen=True, slots=True)
class AppliedCut:
    """A cut in the order in which the token list takes it (right to left, so that no cut moves another)."""

    cut: Cut
    edit_id: str
    index: int  # of the directive in the call
    removed_message_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    entry: MessageEntry
    body: ParsedBody
    invalid: tuple[pb.InvalidToolCall, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    session_id: str
    tools: tuple[pb.Tool, ...] = ()
    table: SpanTable = field(default_factory=SpanTable)
    log: EditLog = field(default_factory=EditLog)
    version: int = 0
    turn: int = 0
    next_id: int = 1

    # ------------------------------------------------------------ append

    def append(self, messages: Sequence[pb.Message], format: ChatFormat) -> tuple[Conversation, TailChange]:
        """Renders messages onto the end, after closing a message that was cut short.

        Raises INVALID_ARGUMENT, UNKNOWN_TOOL_CALL, UNANSWERED_TOOL_CALL, MESSAGE_EXISTS, NOT_SUPPORTED.
        """
        if not messages:
            raise Refusal("INVALID_ARGUMENT", "there are no messages to append", field="messages")
        conversation, change = self._closed(format)
        entries: list[MessageEntry] = list(change.entries)
        ids: list[int] = list(change.ids)
        for message in _in_call_order(messages, conversation.table):
            conversation, entry, rendered = conversation._appended(message, format)
            entries.append(entry)
            ids.extend(rendered)
        return conversation, replace(change, ids=tuple(ids), entries=tuple(entries))

    def append_ids(self, ids: Sequence[int], format: ChatFormat) -> tuple[Conversation, TailChange]:
        """Appends ids as a message without a role."""
        if not ids:
            raise Refusal("INVALID_ARGUMENT", "there is nothing to append", field="content")
        check_vocabulary(ids, format.vocab_size)
        self._refuse_unanswered("content without a role")
        conversation, change = self._closed(format)
        conversation, message_id = conversation._fresh_id("m")
        entry = MessageEntry(message_id, pb.ROLE_RAW, (Part(TEXT, len(ids)),), self.turn)
        after = replace(conversation, table=conversation.table.appended(entry))
        return after, replace(change, ids=(*change.ids, *ids), entries=(*change.entries, entry))

    def _closed(self, format: ChatFormat) -> tuple[Conversation, TailChange]:
        """Closes an open message: a half call goes, the end marker comes. `entries` holds the closed message."""
        last = self.table.messages[-1] if self.table.messages else None
        if last is None or not last.open:
            return self, TailChange(())
        drop = 0
        parts = list(last.parts)
        if parts[-1].kind == CALL and not parts[-1].call_id:
            drop = parts.pop().length
        end = format.close_assistant()
        closed = replace(last, parts=(*parts, *end.parts), open=False)
        return replace(self, table=self.table.with_last(closed)), TailChange(end.ids, (closed,), drop)

    def _appended(self, message: pb.Message, format: ChatFormat) -> tuple[Conversation, MessageEntry, tuple[int, ...]]:
        conversation, message_id = self._named(message)
        tool_name = ""
        if message.role == _TOOL:
            tool_name = self._answering(message.tool_call_id).name
        else:
            self._refuse_unanswered(f"a message of role {pb.Role.Name(message.role).removeprefix('ROLE_').lower()}")
        conversation, calls = conversation._calls_of(message)
        first = not self.table.messages
        tools = self.tools if first else ()
        rendered = format.render(message, [call.id for call in calls], tools, first)
        entry = MessageEntry(
            message_id,
            message.role,
            rendered.parts,
            self.turn,
            tool_call_id=message.tool_call_id,
            tool_name=tool_name,
            calls=calls,
        )
        return replace(conversation, table=self.table.appended(entry)), entry, rendered.ids

    def _named(self, message: pb.Message) -> tuple[Conversation, str]:
        if message.role not in (pb.ROLE_SYSTEM, pb.ROLE_USER, _ASSISTANT, _TOOL):
            raise Refusal(
                "INVALID_ARGUMENT", "a message needs a role: system, user, assistant or tool", field="message.role"
            )
        if message.role != _ASSISTANT and (message.tool_calls or message.reasoning):
            raise Refusal("INVALID_ARGUMENT", "only an assistant message has calls or reasoning", field="tool_calls")
        if message.role != _TOOL and message.tool_call_id:
            raise Refusal("INVALID_ARGUMENT", "only a tool message has a tool_call_id", field="tool_call_id")
        check_id("message_id", message.message_id)
        if not message.message_id:
            return self._fresh_id("m")
        if any(entry.id == message.message_id for entry in self.table.messages):
            raise Refusal(
                "MESSAGE_EXISTS",
                f"message {message.message_id!r} is in this session already",
                message_id=message.message_id,
            )
        return self, message.message_id

    def _answering(self, call_id: str) -> Call:
        waiting = self.table.unanswered()
        call = self.table.calls().get(call_id)
        if call is None or call_id in self.table.answered():
            names = ", ".join(c.id for c in waiting) or "none"
            raise Refusal(
                "UNKNOWN_TOOL_CALL",
                f"no tool call {call_id!r} waits for a result; waiting: {names}",
                call_id=call_id,
                waiting=",".join(c.id for c in waiting),
            )
        if waiting and waiting[0].id != call_id and call.valid:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the result of {call_id!r} comes before that of {waiting[0].id!r}; results stand in the order of "
                "their calls, send them together or in that order",
                call_id=call_id,
                next_call_id=waiting[0].id,
            )
        return call

    def _refuse_unanswered(self, what: str) -> None:
        waiting = self.table.unanswered()
        if waiting:
            names = ", ".join(call.id for call in waiting)
            raise Refusal(
                "UNANSWERED_TOOL_CALL",
                f"{what} can't follow unanswered tool calls: {names}",
                call_ids=",".join(call.id for call in waiting),
            )

    def _calls_of(self, message: pb.Message) -> tuple[Conversation, tuple[Call, ...]]:
        conversation = self
        taken = set(self.table.calls())
        calls: list[Call] = []
        for call in message.tool_calls:
            check_id("tool call id", call.id)
            if not call.name:
                raise Refusal("INVALID_ARGUMENT", "a tool call has no name", field="tool_calls.name")
            error = json_object_error(call.arguments_json)
            if error:
                raise Refusal(
                    "INVALID_ARGUMENT",
                    f"the arguments of tool call {call.name!r} are not a JSON object: {error}",
                    field="arguments_json",
                    call_id=call.id,
                )
            call_id = call.id
            if not call_id:
                conversation, call_id = conversation._fresh_id("call_")
            if call_id in taken:
                raise Refusal("MESSAGE_EXISTS", f"tool call {call_id!r} is in this session already", call_id=call_id)
            taken.add(call_id)
            calls.append(Call(call_id, call.name, call.arguments_json))
        return conversation, tuple(calls)

    def _fresh_id(self, prefix: str) -> tuple[Conversation, str]:
        taken = {entry.id for entry in self.table.messages} | self.table.calls().keys()
        number = self.next_id
        while f"{prefix}{number}" in taken:
            number += 1
        return replace(self, next_id=number + 1), f"{prefix}{number}"

    # ------------------------------------------------------------ generate

    def begin_turn(self, format: ChatFormat, raw: bool) -> tuple[Conversation, tuple[int, ...]]:
        """Opens the message that a Generate writes into, or goes on with one that was cut short. The new ids.

        Raises EMPTY_SESSION, UNANSWERED_TOOL_CALL.
        """
        if not self.table.messages:
            raise Refusal("EMPTY_SESSION", "the session is empty: append something before Generate")
        self._refuse_unanswered("Generate")
        if raw:
            conversation, message_id = self._fresh_id("m")
            entry = MessageEntry(message_id, pb.ROLE_RAW, (), self.turn)
            return replace(conversation, table=self.table.appended(entry)), ()
        if self.table.messages[-1].open:
            return self, ()
        marker = format.open_assistant(first=False)
        conversation, message_id = self._fresh_id("m")
        entry = MessageEntry(message_id, _ASSISTANT, marker.parts, self.turn, open=True)
        return replace(conversation, table=self.table.appended(entry)), marker.ids

    def body_start(self, format: ChatFormat) -> int:
        """Where the body of the message that `begin_turn` opened starts, in tokens."""
        last = self.table.messages[-1]
        head = 0 if last.role == pb.ROLE_RAW else len(format.open_assistant(first=False).ids)
        return len(self.table) - last.length + head

    def end_turn(self, format: ChatFormat, body_ids: Sequence[int]) -> tuple[Conversation, FinishedTurn]:
        """The value after the open message got `body_ids`. Never raises: what was sent stays."""
        last = self.table.messages[-1]
        if last.role == pb.ROLE_RAW:
            entry = replace(last, parts=(Part(TEXT, len(body_ids)),))
            body = ParsedBody(format.decode(body_ids), "", entry.parts, (), True)
            return self._turned(entry), FinishedTurn(entry, body, ())
        head = format.open_assistant(first=False).parts
        body = format.parse(body_ids)
        conversation = self
        parts: list[Part] = []
        calls: list[Call] = []
        invalid: list[pb.InvalidToolCall] = []
        known = {tool.name for tool in self.tools}
        parsed = iter(body.calls)
        for index, part in enumerate(body.parts):
            half = body.half_call and index == len(body.parts) - 1
            if part.kind == CALL and not half:
                call = next(parsed)
                conversation, call_id = conversation._fresh_id("call_")
                error = call.error or ("" if not known or call.name in known else f"no tool {call.name!r}")
                calls.append(Call(call_id, call.name, call.arguments_json, valid=not error))
                if error:
                    invalid.append(pb.InvalidToolCall(id=call_id, text=call.text, error=error))
                part = replace(part, call_id=call_id)
            parts.append(part)
        entry = replace(last, parts=(*head, *parts), calls=tuple(calls), open=not body.closed)
        return conversation._turned(entry), FinishedTurn(entry, body, tuple(invalid))

    def _turned(self, entry: MessageEntry) -> Conversation:
        return replace(self, table=self.table.with_last(entry), turn=self.turn + 1)

    # ------------------------------------------------------------ edit

    def edit(self, cuts: Sequence[Cut], removed_xxh64: Sequence[str]) -> tuple[Conversation, list[AppliedCut]]:
        """Applies checked cuts as one version. Raises UNPAIRED_TOOL_CALL."""
        conversation = replace(self, version=self.version + 1)
        applied: list[AppliedCut] = []
        order = sorted(range(len(cuts)), key=lambda i: (cuts[i].start, cuts[i].end, i), reverse=True)
        for index in order:
            cut = cuts[index]
            edit_id = f"e{conversation.version}" + (f".{index + 1}" if len(cuts) > 1 else "")
            table, pieces = conversation.table, tuple[Piece, ...]()
            log = conversation.log
            if cut.forgets:
                log = log.forget(cut.forgets)
            else:
                table, pieces = table.splice(cut.start, cut.end, len(cut.ids), edit_id, self.turn, cut.rendered)
            record = EditRecord(
                edit_id,
                cut.mode,
                conversation.version,
                cut.start,
                cut.end - cut.start,
                len(cut.ids),
                removed_xxh64[index],
                pieces if cut.mode == pb.MODE_AMORTIZE else (),
            )
            conversation = replace(conversation, table=table, log=log.recorded(record))
            standing = {entry.id for entry in table.messages}
            gone = tuple(p.message.id for p in pieces if p.whole and p.message.id not in standing)
            applied.append(AppliedCut(cut, edit_id, index, gone))
        check_pairs(self.table, conversation.table)
        return conversation, applied

    def undo(self, edit_id: str) -> tuple[Conversation, EditRecord]:
        """Raises UNKNOWN_EDIT, NOT_UNDOABLE, UNPAIRED_TOOL_CALL."""
        record = self.log.check_undoable(edit_id)
        table = self.table.unsplice(record.at, record.inserted, record.pieces, edit_id)
        check_pairs(self.table, table)
        return replace(self, table=table, log=self.log.without(edit_id), version=self.version + 1), record

    # ------------------------------------------------------------ views

    def spans(self, only: set[str] | None = None) -> list[pb.MessageSpan]:
        """The table as protos, all of it or the messages named."""
        out: list[pb.MessageSpan] = []
        start = 0
        for entry in self.table.messages:
            if only is None or entry.id in only:
                out.append(_span(entry, start))
            start += entry.length
        return out

    def edited(self, applied: Sequence[AppliedCut]) -> list[pb.MessageSpan]:
        """The messages that these edits changed, as they stand."""
        edit_ids = {cut.edit_id for cut in applied}
        return self.spans({entry.id for entry in self.table.messages if edit_ids & set(entry.edit_ids)})

    def state(self) -> pb.SessionState:
        return pb.SessionState(
            session_id=self.session_id,
            version=self.version,
            num_tokens=len(self.table),
            turn=self.turn,
            messages=self.spans(),
            edits=self.log.entries(),
            tools=self.tools,
            unanswered_call_ids=[call.id for call in self.table.unanswered()],
        )


def _span(entry: MessageEntry, start: int) -> pb.MessageSpan:
    parts = [pb.Part(kind=p.kind, start=a, end=b, tool_call_id=p.call_id) for p, a, b in entry.ranges(start)]
    return pb.MessageSpan(
        message_id=entry.id,
        role=entry.role,
        start=start,
        end=start + entry.length,
        parts=parts,
        tool_call_id=entry.tool_call_id,
        tool_name=entry.tool_name,
        turn=entry.turn,
        open=entry.open,
        edit_ids=entry.edit_ids,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in entry.calls
            if call.valid
        ],
    )


def _in_call_order(messages: Sequence[pb.Message], table: SpanTable) -> list[pb.Message]:
    """Results of one call arrive in any order; in the list they stand in the order of their calls."""
    order = {call_id: index for index, call_id in enumerate(table.calls())}
    for message in messages:
        for call in message.tool_calls:
            order.setdefault(call.id, len(order))
    out: list[pb.Message] = []
    results: list[pb.Message] = []
    for message in messages:
        if message.role == _TOOL:
            results.append(message)
        else:
            out += sorted(results, key=lambda m: order.get(m.tool_call_id, -1))
            results = []
            out.append(message)
    return out + sorted(results, key=lambda m: order.get(m.tool_call_id, -1))


def check_tools(tools: Sequence[pb.Tool]) -> None:
    """Raises INVALID_ARGUMENT for a nameless or repeated tool, or a schema that is not a JSON object."""
    names: set[str] = set()
    for tool in tools:
        check_id("tool name", tool.name, required=True)
        if tool.name in names:
            raise Refusal("INVALID_ARGUMENT", f"tool {tool.name!r} is given twice", field="tools", tool=tool.name)
        names.add(tool.name)
        error = json_object_error(tool.parameters_json or "{}")
        if error:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the parameters of tool {tool.name!r} are not a JSON object: {error}",
                field="parameters_json",
                tool=tool.name,
            )


def json_object_error(text: str) -> str:
    """Why `text` is not a JSON object; empty when it is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    return "" if isinstance(value, dict) else f"it is a {type(value).__name__}"
