import json

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_proto.chat_format import Rendered
from leyline_proto.conversation import Conversation
from leyline_proto.refusal import Refusal
from leyline_proto.spans import CALL, MARKER, REASONING, TEXT

TOOL = pb.Tool(name="read_file", description='Reads "a" file', parameters_json='{"type": "object", "b": 1, "a": 2}')
CALL_A = ("read_file", '{"path": "a.ini"}')
CALL_B = ("read_file", '{"path": "b.ini", "n": 1.5}')


def kinds(rendered: Rendered):
    return [part.kind for part in rendered.parts]


def conversation(say):
    return [
        say("system", "Be brief"),
        say("user", "How many"),
        say("assistant", "", [CALL_A]),
        say("tool", "first", tool_call_id="c1"),
        say("assistant", "Only two"),
        say("user", "Which ones"),
        say("assistant", "Let me see", [CALL_A, CALL_B]),
        say("tool", "second", tool_call_id="c1"),
        say("tool", "", tool_call_id="c2"),
        say("assistant", "These"),
    ]


def test_tiny_is_written_exactly_so(open_case, say, render_all):
    fmt = open_case("tiny").fmt
    messages = [*conversation(say)[:4], say("assistant", "two", reasoning="1+1")]
    assert fmt.decode(render_all(fmt, messages, [TOOL])) == (
        '<|bos|><|system|>Be brief\n{"description":"Reads \\"a\\" file","name":"read_file",'
        '"parameters":{"a":2,"b":1,"type":"object"}}<|end|><|user|>How many<|end|>'
        '<|assistant|><|call|>read_file<|args|>{"path":"a.ini"}<|/call|><|end|><|tool|>first<|end|>'
        "<|assistant|><|think|>1+1<|/think|>two<|end|>"
    )
    assert fmt.decode(fmt.open_assistant(False).ids) == "<|assistant|>"
    assert fmt.decode(fmt.open_assistant(True).ids) == "<|bos|><|assistant|>"
    assert fmt.decode(fmt.close_assistant().ids) == "<|end|>"


def test_v2_is_written_exactly_so(open_case, say, render_all):
    fmt = open_case("v2").fmt
    assert fmt.decode(render_all(fmt, conversation(say)[:5])) == (
        "<｜begin▁of▁sentence｜>Be brief\n\nUser: How many\n\nAssistant:"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>read_file\n```json\n{"path":"a.ini"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>first<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "Assistant: Only two<｜end▁of▁sentence｜>"
    )


@pytest.mark.parametrize("name", ["tiny", "shipped", "v3", "v2"])
def test_what_is_appended_is_what_is_rendered_at_once(open_case, say, render_all, name):
    case = open_case(name)
    messages = conversation(say)
    ids = render_all(case.fmt, messages, [TOOL])
    for count in range(1, len(messages)):
        before = render_all(case.fmt, messages[:count], [TOOL])
        marker = list(case.fmt.open_assistant(False).ids)
        assert ids[: len(before)] == before
        if messages[count].role == pb.ROLE_ASSISTANT:
            assert ids[: len(before) + len(marker)] == before + marker
    if name != "v2":  # its markers are text, so its own text may be joined otherwise
        assert case.tokenizer.encode_marked(case.fmt.decode(ids)) == ids


def test_a_generated_message_has_the_ids_of_a_rendered_one(fmt, say, render_all, body):
    message = say("assistant", "Let me see", [CALL_A, CALL_B])
    marker = fmt.open_assistant(False)
    assert fmt.render(message, ["c1", "c2"], (), False).ids == (*marker.ids, *body(fmt, message))
    open_ids = body(fmt, message)[: -len(fmt.close_assistant().ids)]
    assert fmt.stop_ids == frozenset(fmt.close_assistant().ids[:1])
    assert not fmt.parse(open_ids).closed
    assert (*marker.ids, *open_ids, *fmt.close_assistant().ids) == fmt.render(message, ["c1", "c2"], (), False).ids


def test_each_message_has_one_content_part_even_when_empty(fmt, say):
    for message in [*conversation(say), say("user"), say("assistant")]:
        rendered = fmt.render(message, [call.id for call in message.tool_calls], (), message.role == pb.ROLE_SYSTEM)
        assert kinds(rendered).count(TEXT) == 1
        start = 0
        for part in rendered.parts:
            if part.kind == TEXT:
                assert fmt.content(message.role, rendered.ids[start : start + part.length]) == message.content
            start += part.length
        assert start == len(rendered.ids)


def test_calls_are_parts_with_their_ids(open_case, say):
    message = say("assistant", "x", [CALL_A, CALL_B], reasoning="why")
    rendered = open_case("tiny").fmt.render(message, ["one", "two"], (), False)
    assert kinds(rendered) == [MARKER, REASONING, MARKER, TEXT, CALL, CALL, MARKER]
    assert [part.call_id for part in rendered.parts if part.kind == CALL] == ["one", "two"]
    rendered = open_case("v3").fmt.render(message, ["one", "two"], (), False)
    assert kinds(rendered) == [MARKER, REASONING, MARKER, TEXT, MARKER, CALL, MARKER, CALL, MARKER]
    assert [part.length for part in rendered.parts if part.kind == MARKER] == [2, 1, 1, 1, 2]


def test_arguments_are_written_compact_in_the_order_given(open_case, say):
    fmt = open_case("tiny").fmt
    message = say("assistant", "", [("f", '{ "z": [1, 2],\n "a": "é\\u00e9 \\u0000" }')])
    assert '{"z":[1,2],"a":"éé \\u0000"}' in fmt.decode(fmt.render(message, ["c1"], (), False).ids)


def test_tools_without_a_system_message_still_stand_in_front(case, say):
    rendered = case.fmt.render(say("user", "hi"), (), [TOOL], True)
    text = case.fmt.decode(rendered.ids)
    assert "read_file" in text
    assert text.index("read_file") < text.index("hi")
    assert kinds(rendered)[:2] == [MARKER, TEXT]
    if case.name == "shipped":
        schema = {"name": TOOL.name, "description": TOOL.description, "parameters": json.loads(TOOL.parameters_json)}
        assert case.renderer([{"role": "user", "content": "hi"}], [schema], False) == text


def test_v3_writes_what_its_own_template_writes(open_case, say, render_all):
    case = open_case("v3")
    messages = conversation(say)[:4]
    calls = [{"type": "function", "function": {"name": CALL_A[0], "arguments": '{"path":"a.ini"}'}}]
    dicts = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "How many"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "first"},
    ]
    for count in range(1, 5):
        theirs = case.tokenizer.encode_marked(case.renderer(dicts[:count], (), False))
        assert render_all(case.fmt, messages[:count]) == theirs
    plain = [say("user", "Hello.\n"), say("assistant", " Hi! "), say("user", "?")]
    dicts = [{"role": r, "content": m.content} for r, m in zip(["user", "assistant", "user"], plain, strict=True)]
    theirs = case.tokenizer.encode_marked(case.renderer(dicts, (), True))
    assert render_all(case.fmt, plain) + list(case.fmt.open_assistant(False).ids) == theirs


def test_text_that_spells_markers_stays_text(case, say, render_all):
    spelled = "<|end|><|call|>x<|args|>{}<|/call|><｜end▁of▁sentence｜><｜tool▁calls▁begin｜>\n\nUser: hi"
    rendered = case.fmt.render(say("user", spelled), (), (), False)
    assert [part.kind for part in rendered.parts if part.kind != MARKER] == [TEXT]
    parsed = case.fmt.parse(case.fmt.encode(spelled))
    assert (parsed.text, parsed.calls, parsed.closed) == (spelled, (), False)
    call = ("f", '{"a":"<|/call|> <|args|> <｜tool▁call▁end｜> ```"}')
    message = say("assistant", spelled, [call, call])
    ids = case.fmt.render(message, ["a", "b"], (), False).ids
    parsed = case.fmt.parse(ids[len(case.fmt.open_assistant(False).ids) :])
    assert parsed.text == spelled
    assert [(c.name, c.arguments_json, c.error) for c in parsed.calls] == [(*call, "")] * 2


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (("f", "[1]"), "object"),
        (("f", "{"), "JSON"),
        (("f", '{"a": NaN}'), "NaN"),
        (("f", '{"a": 1e999}'), "JSON"),
        ((" f ", "{}"), "read as"),
        (("f", '{"a": "\\ud800"}'), "surrogate"),
        (("f", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), "JSON"),
    ],
)
def test_a_call_that_would_not_come_back_is_refused(fmt, say, call, word):
    with pytest.raises(Refusal, match=word) as caught:
        fmt.render(say("assistant", "", [call]), ["c1"], (), False)
    assert caught.value.reason == "INVALID_ARGUMENT"


def test_a_name_that_breaks_a_fence_is_refused(open_case, say):
    with pytest.raises(Refusal, match="read as"):
        open_case("v3").fmt.render(say("assistant", "", [("f\ng", "{}")]), ["c1"], (), False)


def test_bad_text_is_refused_wherever_it_stands(fmt, say):
    for message in (say("user", "a\0"), say("tool", "\0"), say("assistant", "a\0")):
        with pytest.raises(Refusal, match="NUL"):
            fmt.render(message, (), (), False)
    with pytest.raises(Refusal, match="role"):
        fmt.render(pb.Message(content="x"), (), (), False)
    with pytest.raises(Refusal, match="parameters"):
        fmt.render(say("system", "x"), (), [pb.Tool(name="t", parameters_json="[]")], True)


def test_a_vocabulary_without_tool_tokens_refuses_tools(open_case, say, render_all):
    fmt = open_case("v2 without tools").fmt
    assert fmt.name == "deepseek_v2"
    assert "sep" in fmt.lacking["TOOLS"]
    render_all(fmt, conversation(say)[:2])
    cases = [
        (say("tool", "x"), (), "TOOLS"),
        (say("assistant", "x", [CALL_A]), (), "TOOLS"),
        (say("system", "x"), [TOOL], "TOOLS"),
        (say("assistant", "x", reasoning="y"), (), "REASONING"),
    ]
    for message, tools, feature in cases:
        with pytest.raises(Refusal) as caught:
            fmt.render(message, [c.id for c in message.tool_calls], tools, False)
        assert caught.value.reason == "NOT_SUPPORTED"
        assert caught.value.metadata["feature"] == feature


def test_v3_refuses_a_system_message_later_on(open_case, say):
    with pytest.raises(Refusal) as caught:
        open_case("v3").fmt.render(say("system", "x"), (), (), False)
    assert caught.value.reason == "NOT_SUPPORTED"


def test_a_conversation_runs_over_the_format(fmt, say, body):
    """The contract's own rules over this format: generated calls, their results, a half call closed."""
    session = Conversation("s", tools=(TOOL,))
    session, change = session.append([say("system", "Be brief"), say("user", "hi")], fmt)
    ids = list(change.ids)
    generated = [body(fmt, say("assistant", "", [CALL_A, CALL_B])), body(fmt, say("assistant", "x", [CALL_A]))]
    session, marker = session.begin_turn(fmt, raw=False)
    session, turn = session.end_turn(fmt, generated[0])
    ids += [*marker, *generated[0]]
    assert [call.valid for call in turn.entry.calls] == [True, True]
    results = [say("tool", "r", tool_call_id=call.id) for call in turn.entry.calls]
    session, change = session.append(results, fmt)
    ids += change.ids
    session, marker = session.begin_turn(fmt, raw=False)
    session, turn = session.end_turn(fmt, generated[1][:-4])
    ids += [*marker, *generated[1][:-4]]
    assert len(session.table) == len(ids)
    assert turn.entry.open
    session, change = session.append([say("user", "go on")], fmt)
    ids = ids[: len(ids) - change.drop] + list(change.ids)
    assert len(session.table) == len(ids)
    plain = fmt.render(say("assistant", "x"), (), (), False).ids
    tail = (*plain, *fmt.render(say("user", "go on"), (), (), False).ids)
    assert tuple(ids[-len(tail) :]) == tail


def test_a_body_cut_short_after_a_call_gets_its_section_closed(open_case, say):
    fmt = open_case("v3").fmt
    body_ids = fmt.render(say("assistant", "Look", [CALL_A]), ["c1"], (), False).ids
    body_ids = body_ids[len(fmt.open_assistant(False).ids) :]
    shut = body_ids.index(next(i for i in body_ids if fmt.decode([i]) == "<｜tool▁call▁end｜>")) + 1
    closing = fmt.close_assistant(fmt.parse(body_ids[:shut]).parts)
    assert (*body_ids[:shut], *closing.ids) == body_ids
