import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from leyline_proto.refusal import Refusal
from leyline_server.model.tokenizer import TextTokenizer, TokenizerError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
TRICKY = [
    "",
    " ",
    "  two  spaces \t\r\n\n\n ",
    "emoji 👩‍👩‍👧 🤖, accents café, combining e\u0301, CJK 日本語 中文, rtl שלום",
    "\ufffd\ufffd real replacement characters \ufffd",
    "12345 3.14 1e-5",
    "don 't . , !",
    "\x01\x7f\x80\u2028",
]


def test_text_comes_back_as_it_was(case):
    for text in TRICKY:
        assert case.tokenizer.decode(case.tokenizer.encode(text)) == text


def test_text_that_spells_a_special_token_stays_text(case):
    added = json.loads((case.directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    special = {token["id"] for token in added}
    for token in added:
        for text in (token["content"], f"a{token['content']} b", token["content"] * 2):
            ids = case.tokenizer.encode(text)
            assert not special & set(ids)
            assert case.tokenizer.decode(ids) == text


def test_plain_text_has_the_ids_of_the_whole_tokenizer(open_case):
    case = open_case("v3")
    whole = Tokenizer.from_file(str(case.directory / "tokenizer.json"))
    for text in [*TRICKY, 'def f(x):\n\treturn {"a": [1, 2.50]}\n\n\n', "Ġ Â ▁ | ｜"]:
        assert case.tokenizer.encode(text) == whole.encode(text, add_special_tokens=False).ids
    assert case.tokenizer.vocab_size == whole.get_vocab_size()


def test_decoding_equals_the_library_on_any_ids(open_case):
    case = open_case("v3")
    whole = Tokenizer.from_file(str(case.directory / "tokenizer.json"))

    @settings(deadline=None)
    @given(st.lists(st.integers(0, case.tokenizer.vocab_size - 1), max_size=12))
    def check(ids):
        assert case.tokenizer.decode(ids) == whole.decode(ids, skip_special_tokens=False)

    check()


def test_special_tokens_are_shown_and_found(open_case):
    tokenizer = open_case("v3").tokenizer
    user = tokenizer.special_id("<｜User｜>")
    assert tokenizer.decode([user, *tokenizer.encode(" hi ")]) == "<｜User｜> hi "
    assert tokenizer.special_id("User") is None
    assert tokenizer.special_id("Ġthe") is None


def test_ids_without_a_token_show_as_replacement(fmt):
    assert fmt.decode([fmt.vocab_size + 5, -1]) == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("text", "index", "character"),
    [("ab\0c", 2, "U+0000"), ("\0", 0, "U+0000"), ("x\ud800y", 1, "U+D800"), ("ok 🤖 \udfff", 5, "U+DFFF")],
)
def test_nul_and_lone_surrogates_are_refused_by_index(fmt, text, index, character):
    with pytest.raises(Refusal) as caught:
        fmt.encode(text)
    assert caught.value.reason == "INVALID_ARGUMENT"
    assert caught.value.metadata["index"] == str(index)
    assert caught.value.metadata["character"] == character
    assert f"index {index}" in caught.value.message


def test_streams_give_whole_characters(case):
    for text in TRICKY:
        stream = case.tokenizer.detokenizer()
        pushed = [stream.push(token) for token in case.tokenizer.encode(text)]
        assert all("\ufffd" not in piece for piece in pushed) or "\ufffd" in text
        assert "".join(pushed) + stream.flush() == text


def test_an_emoji_of_four_byte_tokens_comes_with_its_last(open_case):
    tokenizer = open_case("tiny").tokenizer
    ids = tokenizer.encode("🤖")
    assert len(ids) == 4
    stream = tokenizer.detokenizer()
    assert [stream.push(token) for token in ids] == ["", "", "", "🤖"]
    for token in ids[:3]:
        assert stream.push(token) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_streaming_any_ids_equals_decoding_them(case):
    @settings(deadline=None)
    @given(st.lists(st.integers(0, case.tokenizer.vocab_size + 2), max_size=20))
    def check(ids):
        stream = case.tokenizer.detokenizer()
        assert "".join(map(stream.push, ids)) + stream.flush() == case.tokenizer.decode(ids)

    check()


def test_any_text_round_trips(case):
    @settings(deadline=None)
    @given(TEXT)
    def check(text):
        assert case.tokenizer.decode(case.tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"decoder": null, "added_tokens": []}'])
def test_what_is_no_tokenizer_is_refused_with_a_reason(text):
    with pytest.raises(TokenizerError, match="token"):
        TextTokenizer(text)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        TextTokenizer.from_dir(tmp_path)


def test_another_kind_of_tokenizer_is_refused(open_case):
    definition = json.loads((open_case("tiny").directory / "tokenizer.json").read_text(encoding="utf-8"))
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(TokenizerError, match="byte-level"):
        TextTokenizer(json.dumps(definition))
