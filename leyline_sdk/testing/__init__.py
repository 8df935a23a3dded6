"""Test policies and agent loops without a server: `FakeServer`, in memory, by the contract's own rules.

    fake = FakeServer(replies=[call("read", path="a.ini"), "the answer is 7"], max_context=2_000)
    with fake.client().session(policies=[MyPolicy()]) as session:
        session.append("What does a.ini say?")
        (wanted,) = session.complete().tool_calls
        session.tool_result(wanted, "seven")
        assert session.complete().text == "the answer is 7"

One token is one byte of text, so that every count can be checked by hand. It keeps no caches: no session finds anything
of another's, by prefix or by content.
"""

from leyline_sdk.testing.byte_format import ByteFormat, Special
from leyline_sdk.testing.script import Say, ScriptedReply, call
from leyline_sdk.testing.server import FakeServer
from leyline_sdk.testing.transports import AsyncFakeTransport, FakeTransport, FlakyTransport

__all__ = [
    "AsyncFakeTransport",
    "ByteFormat",
    "FakeServer",
    "FakeTransport",
    "FlakyTransport",
    "Say",
    "ScriptedReply",
    "Special",
    "call",
]
