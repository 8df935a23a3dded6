"""The families that are served. Every message carries all of its own markers, whatever stands before it: so rendering
messages one by one is rendering them together, and any whole message can be cut out.
"""

from __future__ import annotations

from typing import Final

from leyline_server.model.chat.family import CallStyle, Family, Frame, Token, ToolList

TINY: Final = Family(
    name="tiny",
    begin=(Token("<|bos|>"),),
    system=Frame((Token("<|system|>"),), (Token("<|end|>"),)),
    user=Frame((Token("<|user|>"),), (Token("<|end|>"),)),
    assistant=Frame((Token("<|assistant|>"),), (Token("<|end|>"),)),
    tool=Frame((Token("<|tool|>"),), (Token("<|end|>"),)),
    calls=CallStyle(Token("<|call|>"), Token("<|args|>"), Token("<|/call|>")),
    tools=ToolList(head="", each="\n{json}", keys=("description", "name", "parameters")),
    reasoning=(Token("<|think|>"), Token("<|/think|>")),
)
"""The embedded model's own format; its Jinja template writes the same."""

_CALLS: Final = CallStyle(
    open=Token("<｜tool▁call▁begin｜>"),
    separator=Token("<｜tool▁sep｜>"),
    close=Token("<｜tool▁call▁end｜>"),
    kind="function",
    fence=("\n```json\n", "\n```"),
    section=(Token("<｜tool▁calls▁begin｜>"), Token("<｜tool▁calls▁end｜>")),
    between="\n",
)
_RESULT: Final = Frame(
    (Token("<｜tool▁outputs▁begin｜>"), Token("<｜tool▁output▁begin｜>")),
    (Token("<｜tool▁output▁end｜>"), Token("<｜tool▁outputs▁end｜>")),
)
"""A result is a list of outputs by itself. V3's template puts the results of one turn into one list, which can't be
written one result at a time: when the first arrives nobody knows whether a second will. One result is the same."""
_TOOLS: Final = ToolList(
    head="\n\n## Tools\n\n### Function\n\nYou have the following functions available:\n",
    each="\n- `{name}`:\n```json\n{json}\n```\n",
    keys=("name", "description", "parameters"),
    indent=4,
)
"""V3's and V2's templates drop tools silently; this is the system prompt that DeepSeek documents for them."""

DEEPSEEK_V3: Final = Family(
    name="deepseek_v3",
    begin=(Token("<｜begin▁of▁sentence｜>"),),
    system=Frame((), ()),
    user=Frame((Token("<｜User｜>"),), ()),
    assistant=Frame((Token("<｜Assistant｜>"),), (Token("<｜end▁of▁sentence｜>"),)),
    tool=_RESULT,
    calls=_CALLS,
    tools=_TOOLS,
    reasoning=(Token("<think>"), Token("</think>")),
    system_only_first=True,
)
"""V3's and R1's. The same ids as V3's template for system, user, assistant and the first round of calls with a result.
After a result the assistant has its marker here too, as in the template when it calls but not when it speaks: a
format that is appended to can't know which of the two comes. From the second round on the template drops the
header of the calls; this one doesn't."""

DEEPSEEK_V2: Final = Family(
    name="deepseek_v2",
    begin=(Token("<｜begin▁of▁sentence｜>"),),
    system=Frame((), ("\n\n",)),
    user=Frame(("User:",), ("\n\n",), lead=" "),
    assistant=Frame(("Assistant:",), (Token("<｜end▁of▁sentence｜>"),), lead=" "),
    tool=_RESULT,
    calls=_CALLS,
    tools=_TOOLS,
    reasoning=None,
)
"""V2's. Its template has no role for tools; calls and results are written as V3 does where the vocabulary has their
tokens, as V2-Lite-Chat's has, and refused elsewhere. Content and the line breaks after it are encoded apart, so that
content can be cut out: after a full stop the template has one token where this format has two."""

FAMILIES: Final = (TINY, DEEPSEEK_V3, DEEPSEEK_V2)
