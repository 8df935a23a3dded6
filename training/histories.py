"""Histories as context policies leave them: old tool outputs cleared, cut short or gone.

What an assistant message said right after an output that is now edited can't be learnt from the text: it isn't trained.
"""

from dataclasses import replace
from random import Random
from typing import Literal

from training.render import Message

CLEARED = "[cleared]"

Style = Literal["cleared", "head", "empty", "no_arguments", "dropped"]
STYLES: list[Style] = ["cleared", "head", "empty", "no_arguments", "dropped"]
STYLE_SHARES = [0.72, 0.1, 0.06, 0.06, 0.06]


def old_outputs(messages: list[Message], keep_turns: int) -> set[int]:
    """Indices of tool messages that have at least `keep_turns` assistant messages after them."""
    old: set[int] = set()
    num_later = 0
    for index in reversed(range(len(messages))):
        num_later += messages[index].role == "assistant"
        if messages[index].role == "tool" and num_later >= keep_turns:
            old.add(index)
    return old


def edit_history(messages: list[Message], rng: Random) -> list[Message]:
    """Edits the old outputs of a history in one style: all of them, as one policy would, or a random part."""
    edited = old_outputs(messages, keep_turns=rng.randint(1, 3))
    if rng.random() < 0.35:
        share = rng.uniform(0.2, 0.95)
        edited = {index for index in sorted(edited) if rng.random() < share}
    return apply_edits(messages, edited, rng.choices(STYLES, STYLE_SHARES)[0], rng)


def apply_edits(messages: list[Message], edited: set[int], style: Style, rng: Random) -> list[Message]:
    """`messages` with the tool outputs at the indices `edited` edited in the given style."""
    result: list[Message] = []
    depends = False  # does the next assistant message rest on an edited output?
    for index, message in enumerate(messages):
        if message.role == "tool":
            depends = depends or index in edited
            if style == "dropped" and _exchange_is_edited(messages, index, edited):
                continue
            if index in edited:
                message = replace(message, content=_edited_content(message.content, style, rng))
        elif message.role == "assistant":
            message, depends = replace(message, trained=message.trained and not depends), False
            if message.calls and _exchange_is_edited(messages, index + 1, edited):
                if style == "dropped":
                    depends = True
                    continue
                if style == "no_arguments":
                    calls = tuple(replace(call, arguments={}) for call in message.calls)
                    message = replace(message, calls=calls, trained=False)
        result.append(message)
    return result


def _exchange_is_edited(messages: list[Message], index: int, edited: set[int]) -> bool:
    """True if every result beside the tool message at `index` is edited: only then may its call go as well."""
    start = end = index
    while messages[start - 1].role == "tool":
        start -= 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return all(other in edited for other in range(start, end))


def _edited_content(content: str, style: Style, rng: Random) -> str:
    if style == "head":
        return content[: rng.randint(4, 40)] + rng.choice(("", " ", "\n")) + CLEARED
    if style in ("empty", "dropped"):
        return ""
    return CLEARED
