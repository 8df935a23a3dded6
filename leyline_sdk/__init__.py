"""Leyline's client: sessions whose history can be edited without throwing its KV cache away.

    from leyline_sdk import Leyline

    with Leyline(target="127.0.0.1:50051") as client, client.session(system="You are brief.") as session:
        session.append("Hello!")
        print(session.complete().text)

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leyline_sdk import edits, errors
    from leyline_sdk.aio import AsyncLeyline
    from leyline_sdk.aio_session import AsyncSession
    from leyline_sdk.calls import Retry
    from leyline_sdk.client import Leyline
    from leyline_sdk.edits import (
        Edit,
        clear,
        clear_reasoning,
        cut_content,
        cut_text,
        forget,
        remove,
        remove_span,
        replace_content,
        rerender,
    )
    from leyline_sdk.errors import APIError, LeylineError, PolicyError
    from leyline_sdk.mode import Mode, Repair
    from leyline_sdk.policy import MessagePolicy, Policy, PolicyContext
    from leyline_sdk.reports import (
        AppliedEdit,
        CacheReport,
        Canary,
        Feature,
        Limits,
        PoolStats,
        Receipt,
        ServerInfo,
        Usage,
        Warmed,
    )
    from leyline_sdk.reuse import Reuse, assemble
    from leyline_sdk.session import Session
    from leyline_sdk.stream import AsyncStream, Stream
    from leyline_sdk.transcript import Message, Transcript
    from leyline_sdk.types import (
        Appended,
        Delta,
        EditInfo,
        EditResult,
        FinishReason,
        InvalidToolCall,
        MessageLike,
        Reply,
        SessionInfo,
        SessionSummary,
        ToolCall,
        ToolLike,
        UndoResult,
    )

_HOME = {
    "client": ("Leyline",),
    "aio": ("AsyncLeyline",),
    "session": ("Session",),
    "aio_session": ("AsyncSession",),
    "stream": ("AsyncStream", "Stream"),
    "calls": ("Retry",),
    "edits": (
        "Edit",
        "clear",
        "clear_reasoning",
        "cut_content",
        "cut_text",
        "forget",
        "remove",
        "remove_span",
        "replace_content",
        "rerender",
    ),
    "errors": ("APIError", "LeylineError", "PolicyError"),
    "mode": ("Mode", "Repair"),
    "policy": ("MessagePolicy", "Policy", "PolicyContext"),
    "transcript": ("Message", "Transcript"),
    "reports": (
        "AppliedEdit",
        "CacheReport",
        "Canary",
        "Feature",
        "Limits",
        "PoolStats",
        "Receipt",
        "ServerInfo",
        "Usage",
        "Warmed",
    ),
    "reuse": ("Reuse", "assemble"),
    "types": (
        "Appended",
        "Delta",
        "EditInfo",
        "EditResult",
        "FinishReason",
        "InvalidToolCall",
        "MessageLike",
        "Reply",
        "SessionInfo",
        "SessionSummary",
        "ToolCall",
        "ToolLike",
        "UndoResult",
    ),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "APIError",
    "Appended",
    "AppliedEdit",
    "AsyncLeyline",
    "AsyncSession",
    "AsyncStream",
    "CacheReport",
    "Canary",
    "Delta",
    "Edit",
    "EditInfo",
    "EditResult",
    "Feature",
    "FinishReason",
    "InvalidToolCall",
    "Leyline",
    "LeylineError",
    "Limits",
    "Message",
    "MessageLike",
    "MessagePolicy",
    "Mode",
    "Policy",
    "PolicyContext",
    "PolicyError",
    "PoolStats",
    "Receipt",
    "Repair",
    "Reply",
    "Retry",
    "Reuse",
    "ServerInfo",
    "Session",
    "SessionInfo",
    "SessionSummary",
    "Stream",
    "ToolCall",
    "ToolLike",
    "Transcript",
    "UndoResult",
    "Usage",
    "Warmed",
    "assemble",
    "clear",
    "clear_reasoning",
    "cut_content",
    "cut_text",
    "edits",
    "errors",
    "forget",
    "remove",
    "remove_span",
    "replace_content",
    "rerender",
]


def __getattr__(name: str) -> Any:
    if name in ("edits", "errors"):
        return import_module(f"leyline_sdk.{name}")
    if name in _WHERE:
        return getattr(import_module(f"leyline_sdk.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
