"""Puts a session back when a call that had changed it fails while it computes.

Owns an engine checkpoint while the call runs. Calls that compute nothing need none: they check before they change.
"""

from __future__ import annotations

from leyline_server.sessions.session import Serving, Session


class Transaction:
    """Opened before the first change; ends with `roll_back` or `keep`."""

    def __init__(self, serving: Serving, session: Session) -> None:
        self._engine, self._session = serving.engine, session
        self._conversation = session.conversation
        self._checkpoint = serving.engine.checkpoint(session.sequence)

    def roll_back(self) -> None:
        self._session.conversation = self._conversation
        self._engine.rollback(self._session.sequence, self._checkpoint)

    def keep(self) -> None:
        self._engine.discard(self._checkpoint)
