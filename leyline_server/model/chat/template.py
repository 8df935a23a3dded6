"""A checkpoint's own Jinja chat template, rendered as Hugging Face does, in a sandbox.

Used at start-up to compare with, never to serve. Does not know formats or ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]
Renderer = Callable[[Messages, Sequence[Mapping[str, Any]], bool], str]
"""(messages, tools, add_generation_prompt) -> text. Raises TemplateFailed."""


class TemplateFailed(ValueError):
    """The template can't be read, or refuses the conversation."""


def load_renderer(path: str | Path) -> Renderer | None:
    """The chat template of a checkpoint directory; None when it has none. Raises TemplateFailed."""
    directory = Path(path)
    try:
        config = _read_json(directory / "tokenizer_config.json")
        source = _source(directory, config)
        if source is None:
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        template = environment.from_string(source)
    except (OSError, ValueError, TemplateError) as error:
        raise TemplateFailed(f"the chat template of {directory} can't be read: {error}") from error
    names = {key: _token_text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}

    def render(messages: Messages, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return template.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt, **names
            )
        except Exception as error:  # a template may fail in any way
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error

    return render


def _source(directory: Path, config: Mapping[str, Any]) -> str | None:
    own_file = directory / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several templates by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    value = json.loads(file.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
