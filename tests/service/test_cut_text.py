"""Matches cut out of texts on the real server: only their tokens go, and what stands beside them stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from leyline_policies import KeepLast, Redact
from leyline_sdk import Session, cut_text
from leyline_sdk.mode import Mode
from tests.service.running import RunningServer, small_checkpoint, special, tiny_tokenizer
from tests.service.test_tool_calls import READ, says

KEY = "sk-12345678"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = small_checkpoint(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)
    running = RunningServer(model=model, slots=12000)
    yield running
    running.check_integrity()
    running.stop()


def with_result(server: RunningServer, text: str) -> Session:
    session = server.client().session(tools=[READ], messages=["what is in a?"])
    ids = says("", ("read", '{"path":"a"}'))
    with session.generate(force_token_ids=ids, max_tokens=len(ids)) as stream:
        (call,) = stream.final().tool_calls
    session.tool_result(call, text)
    return session


def shown(session: Session) -> str:
    session.refresh()
    return session.transcript.of_role("tool")[0].text


def test_a_secret_at_the_end_of_a_result_longer_than_any_r(server: RunningServer) -> None:
    words = tiny_tokenizer().decode(tiny_tokenizer().encode("the file says so " * 2000)[:4300])
    session = with_result(server, f"{words}é{KEY}é")
    assert session.transcript.of_role("tool")[0].content_tokens > 4300
    session.prefill()
    session.policies[:] = [Redact(r"sk-\d+"), KeepLast(3)]
    (edit,) = session.complete(max_tokens=2).applied_edits
    assert edit.removed < 20
    assert edit.receipt.mode is Mode.FORGET
    assert not edit.receipt.influence_remains
    assert shown(session) == f"{words}é[redacted]é"
    ids = list(session.info(token_ids=True).token_ids)
    assert KEY not in tiny_tokenizer().decode(ids)
    session.append("and now?")
    assert not session.complete(max_tokens=2).applied_edits
    session.close()


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"{KEY} at the start", "* at the start"),
        (f"at the end {KEY}", "at the end *"),
        (KEY, "*"),
        (f"🙂{KEY}🙂 and 漢{KEY}字", "🙂*🙂 and 漢*字"),
        (f"{KEY},{KEY}{KEY}", "*,**"),
        (f"{KEY} {KEY}\n" * 150, "* *\n" * 150),
    ],
)
def test_matches_anywhere(server: RunningServer, text: str, redacted: str) -> None:
    session = with_result(server, text)
    session.policies[:] = [Redact(r"sk-\d{8}", "*")]
    session.prefill()
    assert session.transcript.of_role("tool")[0].text == redacted
    assert shown(session) == redacted
    assert not session.prefill().applied_edits
    session.complete(max_tokens=2)
    session.close()


def test_characters_within_one_token(server: RunningServer) -> None:
    """The cuts of one call may share a token: they are one cut then, with a receipt each."""
    session = with_result(server, "the result says result")
    message = session.transcript.of_role("tool")[0]
    edits = [cut_text(message, i, i + 1, "R" if i % 2 else "") for i in (5, 6, 8)]
    result = session.edit(*reversed(edits))
    assert len(result.applied_edits) == 3
    assert shown(session) == _cut("the result says result", {5: "R", 6: "", 8: ""})
    for edit in result.applied_edits:
        if edit.removed:
            session.undo(edit.edit_id)
    assert shown(session) == "the result says result"
    session.close()


def _cut(text: str, at: dict[int, str]) -> str:
    return "".join(at.get(index, character) for index, character in enumerate(text))


def test_a_text_that_spells_markers_stays_text(server: RunningServer) -> None:
    session = with_result(server, f"<|user|>{KEY}<|end|>")
    session.policies[:] = [Redact(r"sk-\d+", "<|call|>")]
    session.prefill()
    assert shown(session) == "<|user|><|call|><|end|>"
    tool = session.transcript.of_role("tool")[0]
    ids = session.info(token_ids=True).token_ids[tool.start : tool.end]
    assert special("<|call|>") not in ids
    session.close()
