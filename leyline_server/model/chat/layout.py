"""A family over one vocabulary: its markers as ids. Knows what the vocabulary lacks, and says so."""

from __future__ import annotations

from dataclasses import dataclass

from leyline_proto import leyline_pb2 as pb
from leyline_server.model.chat.family import Family, Frame, Marker, Token
from leyline_server.model.tokenizer import TextTokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FrameIds:
    open: Ids
    close: Ids
    lead: str


@dataclass(frozen=True, slots=True)
class CallIds:
    open: int
    separator: int
    close: int
    section: tuple[int, int] | None
    between: Ids


@dataclass(frozen=True, slots=True)
class Layout:
    """`calls` and `reasoning` are None where `lacking` names the tokens that the vocabulary has not."""

    family: Family
    begin: Ids
    frames: dict[pb.Role.ValueType, FrameIds]
    end: int
    calls: CallIds | None
    reasoning: tuple[int, int] | None
    lacking: dict[str, str]  # feature -> reason


def lay_out(family: Family, tokenizer: TextTokenizer) -> Layout | str:
    """The layout, or why this vocabulary can't have it."""
    essential = (family.begin, family.system.open, family.system.close, family.user.open, family.user.close)
    missing = _missing((*essential, family.assistant.open, family.assistant.close), tokenizer)
    if missing:
        return f"the {family.name} format needs {missing}"

    def frame(of: Frame) -> FrameIds:
        return FrameIds(_ids(of.open, tokenizer), _ids(of.close, tokenizer), of.lead)

    frames = {
        pb.ROLE_SYSTEM: frame(family.system),
        pb.ROLE_USER: frame(family.user),
        pb.ROLE_ASSISTANT: frame(family.assistant),
    }
    lacking: dict[str, str] = {}
    style = family.calls
    call_tokens = (style.open, style.separator, style.close, *(style.section or ()))
    missing = _missing((call_tokens, family.tool.open, family.tool.close), tokenizer)
    calls: CallIds | None = None
    if missing:
        lacking["TOOLS"] = f"the vocabulary has no {missing} for the {family.name} format's calls and results"
    else:
        frames[pb.ROLE_TOOL] = frame(family.tool)
        opened, separator, closed, *section = _ids(call_tokens, tokenizer)
        between = tuple(tokenizer.encode(style.between))
        calls = CallIds(opened, separator, closed, (section[0], section[1]) if section else None, between)
    reasoning: tuple[int, int] | None = None
    missing = _missing((family.reasoning or (),), tokenizer)
    if family.reasoning is None:
        lacking["REASONING"] = f"the {family.name} format has no reasoning"
    elif missing:
        lacking["REASONING"] = f"the vocabulary has no {missing} for the {family.name} format's reasoning"
    else:
        think, end_think = _ids(family.reasoning, tokenizer)
        reasoning = (think, end_think)
    end = frames[pb.ROLE_ASSISTANT].close[0]
    return Layout(family, _ids(family.begin, tokenizer), frames, end, calls, reasoning, lacking)


def _missing(markers: tuple[Marker, ...], tokenizer: TextTokenizer) -> str:
    tokens = [text for marker in markers for text in marker if isinstance(text, Token)]
    return ", ".join(text for text in tokens if tokenizer.special_id(text) is None)


def _ids(marker: Marker, tokenizer: TextTokenizer) -> Ids:
    out: list[int] = []
    for text in marker:
        special = tokenizer.special_id(text) if isinstance(text, Token) else None
        out += tokenizer.encode(text) if special is None else [special]
    return tuple(out)
