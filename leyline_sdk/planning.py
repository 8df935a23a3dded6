"""Runs policies before a call and makes one list of edits of what they plan. Pure: it calls no server.

Owns order (later policies see earlier edits), protection (system, task, last user message), pairs (a call and its
result), and that nothing is edited twice in one call or without need.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from leyline_sdk.edits import EarlierEdit, Edit, InMessage, Span
from leyline_sdk.errors import PolicyError
from leyline_sdk.foresee import changes_nothing, foresee, in_message, text_cut, text_of, touched
from leyline_sdk.mode import stronger
from leyline_sdk.policy import Policy, PolicyContext
from leyline_sdk.text_cuts import TextCut, told_before
from leyline_sdk.transcript import Message, Transcript


@dataclass(frozen=True, slots=True)
class Plan:
    """`edits` with the policy that each came from, and the transcript as it will be."""

    edits: tuple[Edit, ...]
    policies: tuple[str, ...]
    after: Transcript


@dataclass(slots=True)
class _Entry:
    """An edit of the batch, with the messages it changes and, where it is one, its place in one of them."""

    edit: Edit
    policy: str
    ids: frozenset[str]
    place: InMessage | None


def plan(policies: Sequence[Policy], transcript: Transcript, max_context: int, call: str) -> Plan:
    """What the policies would do now.

    Raises:
        PolicyError: a policy raised, edited a protected message or one that is not there, parted a call from its
            result, or planned an edit that can't be joined with another one of the same message.
    """
    batch = _Batch(transcript)
    for policy in policies:
        context = PolicyContext(batch.after, max_context, call)
        try:
            planned = policy.plan(context)
            if planned is None:
                raise PolicyError(f"policy {policy.name}: plan must return edits, not None", policy=policy.name)
            edits = list(planned)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(f"policy {policy.name} raised {error!r}", policy=policy.name) from error
        batch.begin()
        for edit in edits:
            batch.add(edit, policy.name, policy.edits_protected)
        _check_pairs(transcript, batch.after, policy.name)
    return Plan(
        tuple(entry.edit for entry in batch.entries), tuple(entry.policy for entry in batch.entries), batch.after
    )


class _Batch:
    """The edits so far, disjoint, and the transcript after them."""

    def __init__(self, transcript: Transcript) -> None:
        self.before = transcript
        self.after = transcript
        self.entries: list[_Entry] = []
        self._protected = transcript.protected()
        self._own: dict[tuple[str, str], list[TextCut]] = {}  # of the policy that plans now, in the texts that it saw

    def begin(self) -> None:
        """The next policy's edits come."""
        self._own.clear()

    def add(self, edit: Edit, policy: str, edits_protected: bool = False) -> None:
        """Checks one edit, joins it with what is there, or leaves it out as needless."""
        if not isinstance(edit, Edit):
            raise PolicyError(f"policy {policy} planned a {type(edit).__name__}, not an Edit", policy=policy)
        messages = touched(edit, self.after)
        if messages is None:
            raise PolicyError(f"policy {policy} names what is not in the session: {edit.target}", policy=policy)
        for message in messages:
            if message.id in self._protected and (message.open or not edits_protected):
                raise PolicyError(
                    f"policy {policy} may not edit message {message.id!r}: it is {self._protected[message.id]}",
                    policy=policy,
                    message_id=message.id,
                )
        pinned = not edits_protected and any(message.id in self.before.pinned for message in messages)
        place = in_message(edit, self.after)
        if place is not None and place.in_chars:
            edit, place = self._as_it_is_now(edit, place, messages[0], policy)
        if pinned or changes_nothing(edit, self.after):
            return
        edit = replace(edit, label=edit.label or policy)
        entry = _Entry(edit, policy, frozenset(message.id for message in messages), place)
        self.after = foresee(self.after, edit)
        if place is not None and place.in_chars:
            entry = self._as_it_was_before(entry, place)
        others = [other for other in self.entries if _collide(other, entry)]
        for other in others:
            entry = _joined(other, entry)
        self.entries = [other for other in self.entries if other not in others] + [entry]

    def _as_it_is_now(self, edit: Edit, place: InMessage, message: Message, policy: str) -> tuple[Edit, InMessage]:
        """An edit of characters, which counts in the text that its policy saw, told of the text as it is now."""
        own = self._own.setdefault((place.message_id, place.part), [])
        length = len(text_of(message, place))
        seen = text_cut(edit, place, length - sum(one.growth for one in own))
        shift = sum(one.growth for one in own if one.end <= seen.start)
        start, end = seen.start + shift, seen.end + shift
        overlap = any(one.start < seen.end and seen.start < one.end for one in own)
        if not message.text_known or overlap or not 0 <= start <= end <= length:
            why = "whose text is unknown" if not message.text_known else "twice" if overlap else f"of {length}"
            raise PolicyError(
                f"policy {policy} cuts characters [{seen.start}, {seen.end}) of message {message.id!r}, {why}",
                policy=policy,
                message_id=message.id,
            )
        own.append(seen)
        place = replace(place, char_start=start, char_end=end)
        return replace(edit, target=place), place

    def _as_it_was_before(self, entry: _Entry, place: InMessage) -> _Entry:
        """A cut of characters joins those that it overlaps; in a text that is new itself, the text is given anew."""
        part = InMessage(place.message_id, place.part)
        cuts: dict[TextCut, _Entry] = {}
        for other in self.entries:
            if other.place is not None and other.place.in_chars and _same_part(other.place, part):
                cuts[text_cut(other.edit, other.place, 0)] = other
            elif _collide(other, entry):
                message = self.after.get(part.message_id)
                text = text_of(message, part) if message is not None else ""
                return replace(entry, edit=replace(entry.edit, target=part, replacement=text or None), place=part)
        new, inside = told_before(list(cuts), text_cut(entry.edit, place, 0))
        place = replace(part, char_start=new.start, char_end=new.end)
        entry = replace(entry, edit=replace(entry.edit, target=place, replacement=new.text or None), place=place)
        for one in inside:
            entry = _joined(cuts[one], entry)
            self.entries.remove(cuts[one])
        return entry


def _same_part(one: InMessage, other: InMessage) -> bool:
    return (one.message_id, one.part) == (other.message_id, other.part)


def _collide(old: _Entry, new: _Entry) -> bool:
    if isinstance(old.edit.target, Span) and isinstance(new.edit.target, Span):
        return old.edit.target.start < new.edit.target.end and new.edit.target.start < old.edit.target.end
    if isinstance(new.edit.target, EarlierEdit):
        return new.edit.target == old.edit.target
    if old.place is not None and new.place is not None and old.place.in_chars and new.place.in_chars:
        return False  # told of the same text, they are disjoint
    if old.place is not None and new.place is not None and "whole" not in (old.place.part, new.place.part):
        return bool(old.ids & new.ids) and old.place.part == new.place.part
    return bool(old.ids & new.ids)


def _joined(old: _Entry, new: _Entry) -> _Entry:
    """One edit that does both, in the stronger mode. Raises PolicyError when one edit can't say it."""
    both = replace(
        new.edit,
        mode=stronger(old.edit.mode, new.edit.mode),
        label=_named(old.edit.label, new.edit.label),
        allow_sink=old.edit.allow_sink or new.edit.allow_sink,
    )
    joined = replace(new, edit=both, policy=_named(old.policy, new.policy), ids=old.ids | new.ids)
    chars = old.place is not None and old.place.in_chars and new.place is not None and new.place.in_chars
    if isinstance(new.edit.target, EarlierEdit) or chars:
        return joined
    if old.place is not None and new.place is not None and not new.place.partial:
        if new.place.part in ("whole", old.place.part):
            return joined  # the new one covers the old one
        rendered, text = old.edit.replacement, new.edit.replacement
        if isinstance(rendered, Mapping) and (text is None or isinstance(text, str)):
            both = replace(both, target=old.place, replacement={**rendered, new.place.part: text or ""})
            return replace(joined, edit=both, place=old.place)
        if isinstance(rendered, str) and isinstance(text, str | None) and new.place.part == "content":
            return replace(joined, edit=replace(both, target=old.place, replacement=text or ""), place=old.place)
    raise PolicyError(
        f"policy {new.policy} edits {sorted(old.ids & new.ids)}, which {old.policy} edits in the same call; "
        "name the whole content, or put them in another order",
        policy=new.policy,
        message_id=min(old.ids & new.ids, default=None),
    )


def _named(old: str, new: str) -> str:
    return new if old == new else f"{old}+{new}"


def _check_pairs(before: Transcript, after: Transcript, policy: str) -> None:
    """A call goes with its result or not at all."""
    had = {call.id for call in before.unanswered()}
    calls = {call.id for message in after for call in message.tool_calls}
    was = {call.id for message in before for call in message.tool_calls}
    for call in after.unanswered():
        if call.id not in had:
            raise PolicyError(f"policy {policy} removes the result of tool call {call.id!r} alone", policy=policy)
    for result in after.of_role("tool"):
        if result.tool_call_id in was and result.tool_call_id not in calls:
            raise PolicyError(
                f"policy {policy} removes tool call {result.tool_call_id!r} without its result",
                policy=policy,
                message_id=result.id,
            )


def pairs_of(transcript: Transcript, message_ids: Iterable[str]) -> frozenset[str]:
    """These messages and those that they are paired with: a call's message and its results."""
    out = set(message_ids)
    for message in transcript:
        results = [transcript.result_of(call.id) for call in message.tool_calls]
        group = {message.id, *(result.id for result in results if result is not None)}
        if group & out:
            out |= group
    return frozenset(out)


def with_pins(transcript: Transcript) -> Transcript:
    """With the messages that an undo gave back pinned, and those that they are paired with."""
    back = [message.id for message in transcript if message.undone_ids]
    return replace(transcript, pinned=transcript.pinned | pairs_of(transcript, back))


def chunks(edits: Sequence[Edit], transcript: Transcript, size: int) -> list[list[int]]:
    """Indices of the edits in calls of at most `size`, in order; spans first, and pairs in the same call.

    Cuts of characters come last, from the end of each text on: so no call moves what the next one counts. A pair that
    alone is larger than `size` stays whole: the server will say so.
    """
    if len(edits) <= size:
        return [list(range(len(edits)))]
    groups: dict[str, list[int]] = {}
    in_chars: list[tuple[int, int]] = []
    for index, edit in enumerate(edits):
        place = in_message(edit, transcript)
        if place is not None and place.in_chars:
            in_chars.append((-(place.char_start or 0), index))
            continue
        key = "" if place is None else min(pairs_of(transcript, [place.message_id]))
        groups.setdefault(key, []).append(index)
    out: list[list[int]] = [[]]
    ordered = sorted(groups.values(), key=lambda g: (in_message(edits[g[0]], transcript) is not None, g[0]))
    for group in [*ordered, *([index] for _, index in sorted(in_chars))]:
        if out[-1] and len(out[-1]) + len(group) > size:
            out.append([])
        out[-1].extend(group)
    return out
