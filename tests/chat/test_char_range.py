"""Characters of a shown text, cut out of each format's tokens: the text is as a plain cut would leave it."""

from __future__ import annotations

import random

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_proto.char_range import TextMap, char_cuts
from leyline_proto.refusal import Refusal
from leyline_proto.spans import TEXT, MessageEntry, SpanTable
from leyline_sdk.testing.byte_format import ByteFormat

ALPHABET = "aab  the file\nsk-12345é漢🙂🙂\u200d\ufffd  "


def table_of(rendered):
    return SpanTable((MessageEntry("m", pb.ROLE_USER, rendered.parts),))


def spliced(ids, cuts):
    for cut in sorted(cuts.values(), key=lambda c: (c.start, c.end), reverse=True):
        ids = [*ids[: cut.start], *cut.ids, *ids[cut.end :]]
    return ids


def directive(start, end, text):
    target = pb.MessageTarget(message_id="m", char_start=start, char_end=end)
    return pb.Directive(message=target, text=text) if text else pb.Directive(message=target)


def check(fmt, shown, seed):
    pick = random.Random(seed)
    text = "".join(pick.choices(ALPHABET, k=pick.choice([1, 3, 30, 900])))
    rendered = fmt.render(pb.Message(role=pb.ROLE_USER, content=text), [], (), True)
    table = table_of(rendered)
    ends = sorted(pick.sample(range(len(text) + 1), k=min(len(text) + 1, 2 * pick.randrange(1, 6)) // 2 * 2))
    wanted = [(a, b, pick.choice(["", "x", " é🙂"])) for a, b in zip(ends[::2], ends[1::2], strict=True)]
    directives = [directive(*one) for one in pick.sample(wanted, k=len(wanted))]
    cuts = char_cuts(directives, table, fmt, lambda a, b: rendered.ids[a:b])
    after = spliced(list(rendered.ids), cuts)
    place = next(index for index, part in enumerate(rendered.parts) if part.kind == TEXT)
    head = sum(part.length for part in rendered.parts[:place])
    tail = sum(part.length for part in rendered.parts[place + 1 :])
    expected = text
    for a, b, new in reversed(wanted):
        expected = expected[:a] + new + expected[b:]
    assert shown(after[head : len(after) - tail]) == expected
    assert after[:head] == list(rendered.ids[:head])
    removed = sum(cut.end - cut.start for cut in cuts.values())
    assert removed <= sum(len(text[a:b].encode()) + 8 for a, b, _ in wanted)


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_of_any_text(fmt, seed):
    check(fmt, lambda ids: fmt.content(pb.ROLE_USER, ids), seed)


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_of_bytes(seed):
    check(ByteFormat(), ByteFormat().decode, seed)


def test_a_lead_is_no_character_of_the_text(open_case):
    fmt = open_case("v2").fmt
    rendered = fmt.render(pb.Message(role=pb.ROLE_USER, content="hello you"), [], (), True)
    for new, shown in (("", ""), ("X", " X")):
        cuts = char_cuts([directive(0, 9, new)], table_of(rendered), fmt, lambda a, b: rendered.ids[a:b])
        at = rendered.parts[0].length
        assert fmt.decode(spliced(list(rendered.ids), cuts)[at : -rendered.parts[2].length]) == shown
    with pytest.raises(Refusal) as caught:
        char_cuts([directive(0, 10, "")], table_of(rendered), fmt, lambda a, b: rendered.ids[a:b])
    assert (caught.value.reason, caught.value.metadata["length"]) == ("SPAN_OUT_OF_RANGE", "9")


def test_bytes_that_form_no_character_are_counted_as_shown():
    ids = [*b"a\xf0\x9f\xffb\xe6\xbc", *"漢".encode(), *b"\x82c"] * 90
    text = TextMap(ids, ByteFormat().decode, "")
    assert text.text == ByteFormat().decode(ids)
    for start in range(0, len(text.text), 7):
        first, last = text.cover(start, start + 1)
        assert text.chars_before(first) <= start < text.chars_before(last)
