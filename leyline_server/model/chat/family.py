"""What a family of chat formats is: which markers open and close each role, and how a tool call is delimited.

Declarations only. One renderer and one parser read them, so that a family is data and no code.
"""

from __future__ import annotations

from dataclasses import dataclass


class Token(str):
    """A special token, found in the vocabulary by its text. Marker strings of any other type are plain text."""

    __slots__ = ()


Marker = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """How the messages of one role are delimited.

    `lead` stands between the marker and a content that is not empty, and belongs to the content's part: where the
    marker is plain text, the space after it is one token with the word that follows.
    """

    open: Marker
    close: Marker
    lead: str = ""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How one tool call is delimited, and all the calls of a message.

    Without `kind` a call is `open name separator arguments close`. With it, the kind stands where the name did, and
    the name after the separator, before a fenced block: `open kind separator name fence[0] arguments fence[1] close`.
    """

    open: Token
    separator: Token
    close: Token
    kind: str = ""
    fence: tuple[str, str] = ("", "")
    section: tuple[Token, Token] | None = None
    between: str = ""  # between two calls


@dataclass(frozen=True, slots=True)
class ToolList:
    """How the tools' schemas follow the system prompt. `each` takes {name} and {json}."""

    head: str
    each: str
    keys: tuple[str, ...]
    indent: int | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A chat format. What its vocabulary lacks of `tool`, `calls` or `reasoning` is refused, never dropped."""

    name: str
    begin: Marker  # before the first message
    system: Frame
    user: Frame
    assistant: Frame
    tool: Frame
    calls: CallStyle
    tools: ToolList
    reasoning: tuple[Token, Token] | None
    system_only_first: bool = False  # its system messages have no marker that would set them off later on
