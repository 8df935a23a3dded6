"""One Generate of the fake, a token at a time: its events, its end, and its cancellation."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from leyline_proto import leyline_pb2 as pb
from leyline_sdk.testing.byte_format import ByteFormat, Special

Finish = Callable[[list[int], "pb.FinishReason.ValueType", str], pb.GenerateDone]
"""(ids, reason, stop string) -> the last event, after the session has taken the message."""


class Generating:
    """Steps when it is read, or to its end when somebody waits for it. `events` is all that was said."""

    def __init__(
        self,
        started: pb.GenerateStarted,
        ids: Sequence[int],
        budget: int,
        request: pb.GenerateRequest,
        finish: Finish,
        body: Sequence[int] = (),
    ) -> None:
        """`body`: what the message said before it was cut short, when this goes on with it."""
        self.events = [pb.GenerateResponse(started=started)]
        self.over = False
        self._unread = deque(self.events)
        self._ids = deque(ids)
        self._budget = budget
        self._request = request
        self._finish = finish
        self._said: list[int] = []
        self._thinking = self._calling = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # text that may still turn out to be a stop string
        for token in body:
            self._decoded(token)

    @classmethod
    def replay(cls, events: Sequence[pb.GenerateResponse]) -> Generating:
        """The first answer again: nothing is said anew."""
        again = cls(events[0].started, (), 0, pb.GenerateRequest(), lambda ids, reason, stop: events[-1].done)
        again.over = True
        again._unread = deque(events)
        return again

    def read(self) -> pb.GenerateResponse | None:
        """The next event; None after the last."""
        while not self._unread and not self.over:
            self._step()
        return self._unread.popleft() if self._unread else None

    def drain(self) -> None:
        """To the end, without a reader."""
        while not self.over:
            self._step()

    def cancel(self) -> None:
        """Ends here; what was said stays."""
        if not self.over:
            self._end(pb.FINISH_REASON_CANCELLED)

    def _step(self) -> None:
        if len(self._said) >= self._budget:
            self._end(pb.FINISH_REASON_LENGTH)
        elif self._ids:
            self._say(self._ids.popleft())
        elif self._request.ignore_eos:
            self._say(ord(" "))
        else:
            self._end(pb.FINISH_REASON_STOP)

    def _say(self, token: int) -> None:
        self._said.append(token)
        text, reasoning = self._decoded(token)
        stop = ""
        if text or self._held:
            self._held += text
            stop = next((s for s in self._request.stop if s in self._held), "")
            keep = max((len(s) - 1 for s in self._request.stop), default=0)
            cut = self._held.index(stop) if stop else max(0, len(self._held) - keep)
            text, self._held = self._held[:cut], "" if stop else self._held[cut:]
        self._push(pb.GenerateResponse(delta=pb.Delta(text=text, reasoning=reasoning, token_ids=[token])))
        if stop:
            self._end(pb.FINISH_REASON_STOP_STRING, stop)
        elif token in self._request.stop_token_ids or (token in ByteFormat.stop_ids and not self._request.ignore_eos):
            self._end(pb.FINISH_REASON_STOP)

    def _decoded(self, token: int) -> tuple[str, str]:
        """(text, reasoning): whole characters that this token completes. A call is neither."""
        if token >= 256:
            self._thinking = token == Special.THINK
            self._calling = token in (Special.CALL, Special.ARGS)
            self._decoder.reset()
            return "", ""
        piece = "" if self._calling else self._decoder.decode(bytes([token]))
        return ("", piece) if self._thinking else (piece, "")

    def _push(self, event: pb.GenerateResponse) -> None:
        self.events.append(event)
        self._unread.append(event)

    def _end(self, reason: pb.FinishReason.ValueType, stop: str = "") -> None:
        if self._held:
            self._push(pb.GenerateResponse(delta=pb.Delta(text=self._held)))
        self.over = True
        self._push(pb.GenerateResponse(done=self._finish(self._said, reason, stop)))
