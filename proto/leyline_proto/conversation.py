"""A session as its client sees it: messages, tools, version, edits. An immutable value.

Owns the rules of appending, generating, editing and undoing, in terms of token counts. Each operation
returns the next value together with what has to happen to the token list; whoever keeps the list does that
and assigns the value, or does neither. It does not know KV, slots or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from leyline_proto import leyline_pb2 as pb
from leyline_proto.changes import AppliedCut, FinishedTurn, TailChange, UndoneEdit
from leyline_proto.chat_format import ChatFormat, ParsedBody
from leyline_proto.directives import Cut, check_vocabulary
from leyline_proto.edit_log import EditLog, EditRecord
from leyline_proto.messages import check_message
from leyline_proto.refusal import Refusal
from leyline_proto.spans import CALL, TEXT, Call, MessageEntry, Part, Piece, SpanTable
from leyline_proto.tool_pairs import answering, check_pairs, in_call_order, refuse_unanswered
from leyline_proto.views import span_of

_TOOL, _ASSISTANT = pb.ROLE_TOOL, pb.ROLE_ASSISTANT


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
        for message in in_call_order(messages, conversation.table):
            conversation, entry, rendered = conversation._appended(message, format)
            entries.append(entry)
            ids.extend(rendered)
        return conversation, replace(change, ids=tuple(ids), entries=tuple(entries))

    def append_ids(self, ids: Sequence[int], format: ChatFormat) -> tuple[Conversation, TailChange]:
        """Appends ids as a message without a role."""
        if not ids:
            raise Refusal("INVALID_ARGUMENT", "there is nothing to append", field="content")
        check_vocabulary(ids, format.vocab_size)
        refuse_unanswered(self.table, "content without a role")
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
        end = format.close_assistant(parts)
        closed = replace(last, parts=(*parts, *end.parts), open=False)
        return replace(self, table=self.table.with_last(closed)), TailChange(end.ids, (closed,), drop)

    def _appended(self, message: pb.Message, format: ChatFormat) -> tuple[Conversation, MessageEntry, tuple[int, ...]]:
        check_message(message)
        conversation, message_id = self._named(message)
        tool_name = ""
        if message.role == _TOOL:
            tool_name = answering(self.table, message.tool_call_id).name
        else:
            refuse_unanswered(
                self.table, f"a message of role {pb.Role.Name(message.role).removeprefix('ROLE_').lower()}"
            )
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
        if not message.message_id:
            return self._fresh_id("m")
        if any(entry.id == message.message_id for entry in self.table.messages):
            raise Refusal(
                "MESSAGE_EXISTS",
                f"message {message.message_id!r} is in this session already",
                message_id=message.message_id,
            )
        return self, message.message_id

    def _calls_of(self, message: pb.Message) -> tuple[Conversation, tuple[Call, ...]]:
        conversation = self
        taken = set(self.table.calls())
        calls: list[Call] = []
        for call in message.tool_calls:
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
        refuse_unanswered(self.table, "Generate")
        if raw:
            if self.table.messages[-1].open:
                raise Refusal(
                    "INVALID_ARGUMENT",
                    f"message {self.table.messages[-1].id!r} was cut short: go on with it without raw, or append first",
                    field="raw",
                )
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
            if not cut.forgets:
                table, pieces = table.splice(cut.start, cut.end, len(cut.ids), edit_id, self.turn, cut.rendered)
            record = EditRecord(
                edit_id,
                cut.mode,
                conversation.version,
                cut.end - cut.start,
                len(cut.ids),
                removed_xxh64[index],
                pieces if cut.mode == pb.MODE_AMORTIZE else (),
            )
            log = conversation.log.recorded(record, cut.start)
            if cut.mode == pb.MODE_FORGET:
                log = log.forget(*log.lost_to(edit_id, cut.forgets))
            conversation = replace(conversation, table=table, log=log)
            standing = {entry.id for entry in table.messages}
            gone = tuple(p.message.id for p in pieces if p.whole and p.message.id not in standing)
            applied.append(AppliedCut(cut, edit_id, index, gone))
        check_pairs(self.table, conversation.table)
        return conversation, applied

    def undo(self, edit_id: str) -> tuple[Conversation, list[UndoneEdit]]:
        """Undoes one edit, or all edits of one call ("e3" for e3.1, e3.2, ..), in the order of the list returned.

        Raises UNKNOWN_EDIT, NOT_UNDOABLE, UNPAIRED_TOOL_CALL.
        """
        table, log = self.table, self.log
        undone: list[UndoneEdit] = []
        for one in log.of_version(edit_id):
            why = log.why_not_undoable(one)
            record, at = log.find(one), log.where(one)
            if not why:
                table, log = table.unsplice(at, record.inserted, record.pieces, one), log.without(one)
                undone.append(UndoneEdit(one, at, record.inserted))
                why = _taken_again(table)
            if why:
                raise Refusal("NOT_UNDOABLE", f"edit {one!r} can't be undone: {why}", edit_id=one)
        check_pairs(self.table, table)
        return replace(self, table=table, log=log, version=self.version + 1), undone

    # ------------------------------------------------------------ views

    def spans(self, only: set[str] | None = None) -> list[pb.MessageSpan]:
        """The table as protos, all of it or the messages named."""
        out: list[pb.MessageSpan] = []
        start = 0
        for entry in self.table.messages:
            if only is None or entry.id in only:
                out.append(span_of(entry, start))
            start += entry.length
        return out

    def edited(self, applied: Sequence[AppliedCut]) -> list[pb.MessageSpan]:
        """The messages that these edits changed, as they stand."""
        edit_ids = {cut.edit_id for cut in applied}
        return self.spans({entry.id for entry in self.table.messages if not edit_ids.isdisjoint(entry.edit_ids)})

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


def _taken_again(table: SpanTable) -> str:
    """What stands twice after an undo: its id was given anew, or an insertion parts it. Empty when nothing does."""
    ids = [entry.id for entry in table.messages]
    calls = [call.id for entry in table.messages for call in entry.calls]
    twice = next((one for names in (ids, calls) for one in names if names.count(one) > 1), "")
    return twice and f"{twice!r} stands in the session already"
