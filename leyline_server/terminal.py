"""What the programs here have in common on a terminal. Knows nothing of what they do."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape


def complain(console: Console, program: str, error: object, what: str = "") -> None:
    """One line, whatever brackets are in it and however narrow the terminal is."""
    console.print(f"[red]{program}: {what}[/]{escape(str(error))}", highlight=False, soft_wrap=True)


def no_bars_in_a_log() -> None:
    """Silences Hugging Face's progress bars where stderr is no terminal: they would fill it with their steps."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
