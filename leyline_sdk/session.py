"""A session for threads. Every method runs an operation; the logic is in `operations` and `stream`.

Owns the public surface and its documentation. `aio_session` is the twin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from leyline_sdk import operations, warming
from leyline_sdk.core import SessionCore
from leyline_sdk.edits import Edit
from leyline_sdk.policy import Policy
from leyline_sdk.reports import Warmed
from leyline_sdk.reuse import Reuse
from leyline_sdk.runner import Runner
from leyline_sdk.stream import Stream, StreamCore
from leyline_sdk.transcript import Transcript
from leyline_sdk.types import Appended, EditResult, MessageLike, Reply, SessionInfo, ToolCall, UndoResult


class Session:
    """One conversation on the server. Leaving its `with` block detaches: only `close()` frees what it holds.

    Before each append, generate and prefill the session's policies run, and their edits go in the same call. Not
    thread-safe. Every method raises `APIError`s; those that run policies also PolicyError.
    """

    def __init__(self, core: SessionCore, runner: Runner) -> None:
        self._core = core
        self._runner = runner
        core.timeout_s = runner.config.timeout_s
        self._stream: Stream | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def created(self) -> bool:
        """Whether this call made it; False: it was there, and was resumed."""
        return self._core.created

    @property
    def transcript(self) -> Transcript:
        """The messages as this side knows them: no call is made."""
        return self._core.transcript

    @property
    def unanswered(self) -> list[ToolCall]:
        """The model's calls without a result, in order, as this side knows them: no call is made. `refresh()` first
        after a stream that was left early or lost."""
        return self._core.transcript.unanswered()

    @property
    def reuse(self) -> Reuse:
        """What it takes from the server's caches, and leaves there. For the session's whole life."""
        return self._core.reuse

    @property
    def policies(self) -> list[Policy]:
        """In the order in which they run. May be changed between calls."""
        return self._core.policies

    def append(
        self,
        messages: MessageLike | Sequence[MessageLike],
        *,
        prefill: bool = False,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Appended:
        """Adds messages: a str is a user message, a dict is OpenAI-style.

        Args:
            prefill: compute everything that has no KV yet before returning.
            wait: queue behind a running Generate instead of raising SessionBusy.

        Raises:
            UnansweredToolCall, UnknownToolCall: calls and results don't match.
            ContextExceeded: these messages alone are larger than a session may be.
            StaleVersion, StaleLength: somebody else changed the session.
        """
        return self._runner.run(
            operations.append(self._core, messages=messages, prefill=prefill, wait=wait, timeout_s=timeout_s)
        )

    def append_text(self, text: str, *, prefill: bool = False, wait: bool = False) -> Appended:
        """Adds text without a role."""
        return self._runner.run(operations.append(self._core, text=text, prefill=prefill, wait=wait))

    def append_ids(self, token_ids: Sequence[int], *, prefill: bool = False, wait: bool = False) -> Appended:
        """Adds token ids without a role."""
        return self._runner.run(operations.append(self._core, token_ids=token_ids, prefill=prefill, wait=wait))

    def tool_result(self, call: ToolCall | str, content: str, *, prefill: bool = False) -> Appended:
        """Answers one tool call. With several in a turn, in the order of the calls; or `append_results`."""
        return self.append_results({_call_id(call): content}, prefill=prefill)

    def append_results(self, results: Mapping[str, str], *, prefill: bool = False, wait: bool = False) -> Appended:
        """Answers several tool calls, {call id: content}, in any order."""
        return self._runner.run(operations.append_results(self._core, results, prefill=prefill, wait=wait))

    def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        wait: bool = False,
        raw: bool = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        force_token_ids: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> Stream:
        """Lets the model speak. Returns once the server has admitted the call.

        Args:
            max_tokens: at least 1; None: the server's default (1,024 unless configured), or what fits.
            temperature: [0, 100]; None or 0 is greedy.
            top_p: (0, 1]. top_k: at least 1.
            stop: up to 16 strings that end the message.
            raw: go on with the tokens as they are, without opening an assistant message.
            ignore_eos: go on to max_tokens (benchmarks). force_token_ids: taken instead of samples (replays).
            timeout_s: seconds for the whole stream.

        Raises:
            UnansweredToolCall, EmptySession, ContextExceeded, PoolExceeded, QueueFull, SessionBusy, ..
        """
        request, todo = self._runner.run(
            operations.generate(
                self._core,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=stop,
                wait=wait,
                raw=raw,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
                force_token_ids=force_token_ids,
            )
        )
        self._stream = Stream(StreamCore(self._core, request, todo), self._runner, timeout_s)
        return self._stream

    def complete(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """`generate` without a stream."""
        with self.generate(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=stop,
            wait=wait,
            timeout_s=timeout_s,
        ) as stream:
            return stream.final()

    def edit(
        self,
        *edits: Edit,
        dry_run: bool = False,
        prefill: bool = False,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> EditResult:
        """Edits by hand, as one transaction: all or none. System and user messages are not protected from you.

        `wait`: queue behind a running Generate, as in `append`.

        Raises:
            IllegalCut, SpanOutOfRange, SpansOverlap, AttentionSink, UnpairedToolCall: not allowed.
            UnknownMessage, UnknownToolCall, UnknownEdit: what it names is not there.
        """
        return self._runner.run(
            operations.edit(self._core, edits, dry_run=dry_run, prefill=prefill, wait=wait, timeout_s=timeout_s)
        )

    def undo(self, edit_id: str, *, wait: bool = False) -> UndoResult:
        """Puts back what an AMORTIZE removed. Policies then leave it alone, also after a resume.

        Raises:
            NotUndoable: a FORGET, or a later edit covers it. UnknownEdit.
        """
        return self._runner.run(operations.undo(self._core, edit_id, wait=wait))

    def preview(self) -> EditResult:
        """What the policies would do now. Changes nothing."""
        return self._runner.run(operations.preview(self._core))

    def prefill(self, *, wait: bool = False, timeout_s: float | None = None) -> EditResult:
        """Runs the policies and computes all that is pending, for instance while tools run."""
        return self._runner.run(operations.prefill(self._core, wait=wait, timeout_s=timeout_s))

    def warm(self, documents: str | Sequence[str], *, timeout_s: float | None = None) -> tuple[Warmed, ...]:
        """Computes documents ahead of their use, so that sessions of `Reuse.CONTENT` find them by their content: this
        one or others of the same api key's tenant. One result a document, in order.

        Each is computed behind this session's tools and first system message, in a session of its own (REGISTER) that
        is closed at once; this session, which may be of any reuse, is not touched. The rows stay in the server's caches
        until others need the room. To keep them longer, keep a session of REGISTER open that holds the document: a pin.
        A call may be repeated, after an error too: what is still there is not computed again.

        Fewer than 32 equal tokens can't be found, so a shorter document is warmed for nothing. Nor can tokens at the
        first 32 positions of a session: some of those are a document's own where system message and tools are shorter.

        Args:
            timeout_s: seconds for each document.

        Raises:
            InvalidArgument: a document is empty or no text; nothing was computed.
            ContextExceeded, PoolExceeded: a document is larger than a session may be. Those before it are warm.
            TooManySessions: there is no room for one more.
        """
        return self._runner.run(warming.warm(self._core, documents, timeout_s))

    def fork(self, session_id: str | None = None) -> Session:
        """A second session over the same slots, with the same policies. Nothing is copied or computed."""
        return Session(self._runner.run(operations.fork(self._core, session_id)), self._runner)

    def info(self, *, token_ids: bool = False) -> SessionInfo:
        """The session as the server sees it, with its edit log."""
        return self._runner.run(operations.info(self._core, token_ids=token_ids))

    def refresh(self) -> None:
        """Fetches the transcript anew, for instance after StaleVersion. After a stream that was left early or lost it
        waits for the Generate to end, and the next call does so by itself."""
        self._runner.run(self._core.refresh())

    def close(self) -> int:
        """Ends the session on the server. The slots that were freed."""
        if self._stream is not None:
            self._stream.cancel()
        return self._runner.run(operations.close(self._core))


def _call_id(call: ToolCall | str) -> str:
    return call if isinstance(call, str) else call.id
