"""A text that can't fit is refused by its bytes, before anybody spends time on its tokens."""

from __future__ import annotations

import pytest

from leyline_proto import leyline_pb2 as pb
from leyline_sdk import errors
from leyline_server.model.tokenizer import TextTokenizer
from tests.contract.scene import fresh
from tests.service.running import RunningServer
from tests.service.talk import Talk, span, user

HUGE = "port " * 1_000_000


def test_a_huge_text_is_not_encoded(small: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Talk(small, user("one two three", "q"))
    before, encode = talk.state, TextTokenizer.encode

    def bounded(self: TextTokenizer, text: str) -> list[int]:
        assert len(text) < len(HUGE), "a text beyond every bound was encoded"
        return encode(self, text)

    monkeypatch.setattr(TextTokenizer, "encode", bounded)
    for request in (
        pb.CreateSessionRequest(request_id=fresh(), messages=[user(HUGE)]),
        talk.appending(user(HUGE)),
        pb.AppendRequest(request_id=fresh(), session_id=talk.id, text=HUGE),
    ):
        with pytest.raises(errors.ResourceExhausted) as caught:
            talk.call(request)
        assert caught.value.reason == "CONTEXT_EXCEEDED"
        assert caught.value.metadata["limit"] == str(small.limits.max_context)
    with pytest.raises(errors.APIError) as refused:
        talk.edit(span(6, 7, text=HUGE))
    assert refused.value.reason == "TOO_LONG"
    assert talk.state == before
    talk.close()
