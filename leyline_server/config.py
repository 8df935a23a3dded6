"""The server's settings: flags, environment, file, defaults, in that order of precedence.

Owns their names, bounds and help, and how settings of any program here are read; knows nothing of what they configure.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import (
    SettingsError as SourceError,
)

_HELP = """Serves one MLA model whose KV cache can be edited while it lives.

Every setting can be a flag (--max-context 8192), an environment variable (LEYLINE_SERVER_MAX_CONTEXT=8192), or a line
of the TOML file named by --config (max_context = 8192); flags win over the environment, the environment over the file.
Ctrl-C drains: running calls end, new ones are refused."""


class SettingsError(ValueError):
    """Settings that can't be used; the message names each one and its bound."""


class Settings(BaseSettings):
    """What the settings of both programs have in common."""

    model_config = SettingsConfigDict(
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        extra="forbid",
        protected_namespaces=(),
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is made in a program is what the program says: `load_config` alone reads the environment."""
        return (init_settings,)


class ServerConfig(Settings):
    __doc__ = _HELP

    model_config = SettingsConfigDict(env_prefix="LEYLINE_SERVER_", cli_prog_name="leyline-server")

    config: Path | None = Field(default=None, description="a TOML file with settings")
    model: str = Field(
        default="tiny",
        description="a checkpoint directory, a hub id, or a model in the package: 'tiny', or 'notes', which was "
        "trained with edits",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=50051, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: str = Field(default="auto", description="cpu, cuda, cuda:1, ..; auto takes a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of weights and cache; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    slots: int | None = Field(
        default=None, ge=16, description="tokens the pool holds; unset: what memory_fraction of the free memory holds"
    )
    memory_fraction: float = Field(
        default=0.8, gt=0, lt=1, description="of the free device memory that the pool may take"
    )
    max_context: int | None = Field(
        default=None, ge=16, description="tokens in one session; unset: what model and pool allow"
    )
    prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        description="pending tokens computed in one step, all sessions together; unset: 512 on a CPU, 2048 on a GPU, "
        "and 8192 there while one request has it to itself",
    )
    content_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="the share of the pool that is kept for content reuse beyond what sessions hold; 0: there is none",
    )
    max_sessions: int = Field(default=1024, ge=1, description="sessions held at once")
    max_running: int = Field(default=64, ge=1, description="requests computed at once; others wait")
    max_queue: int = Field(
        default=64, ge=1, description="requests that may wait for slots or a place to run, and calls for one session"
    )
    session_ttl: float = Field(default=3600, gt=0, description="seconds without a call after which a session is closed")
    default_max_tokens: int = Field(default=1024, ge=1, description="tokens of a Generate that names no max_tokens")
    max_replacement: int | None = Field(
        default=None, ge=1, description="tokens in one R; unset: 4096, or what a session holds"
    )
    max_directives: int = Field(default=256, ge=1, description="directives in one call")
    remembered_requests: int = Field(default=4096, ge=1, description="request ids whose answers are kept for retries")
    api_keys: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        description="key=tenant pairs, separated by commas; without any, everybody is tenant 'default'",
    )
    canary: Literal["off", "refuse", "warn"] = Field(
        default="off",
        description="a minute's self-test of edits at load; out of bounds, AMORTIZE is refused, or only warned of; "
        "--canary alone: refuse",
    )
    canary_agreement: float = Field(
        default=0.9, ge=0, le=1, description="the least share of the canary's probes that AMORTIZE has to answer alike"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of the model; unset: torch's choice")
    drain: float = Field(default=10, ge=0, description="seconds that running calls get at Ctrl-C")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="what is logged to stderr"
    )

    @field_validator("api_keys", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        """Flags and the environment give text, a file a table."""
        if isinstance(value, str):
            pairs = [pair.partition("=") for pair in value.split(",") if pair]
            if not all(key and tenant for key, _, tenant in pairs):
                raise ValueError("not key=tenant pairs separated by commas")
            return {key.strip(): tenant.strip() for key, _, tenant in pairs}
        return value


def load_config(args: Sequence[str]) -> ServerConfig:
    """Reads flags, environment and file. `--help` prints and exits. Raises SettingsError."""
    with reading():
        flags: CliSettingsSource[ServerConfig] = CliSettingsSource(ServerConfig, cli_parse_args=_complete(args))
        environment = EnvSettingsSource(ServerConfig)
        _check_names(os.environ)
        path = flags().get("config") or environment().get("config")
        sources: list[PydanticBaseSettingsSource] = [flags, environment]
        if path:
            if not Path(path).is_file():
                raise SettingsError(f"config: there is no file {path}")
            try:
                sources.append(TomlConfigSettingsSource(ServerConfig, Path(path)))
            except (TOMLDecodeError, UnicodeDecodeError) as error:
                raise SettingsError(f"config: {path} is not TOML: {error}") from error
        values: dict[str, object] = {}
        for source in reversed(sources):
            values |= source()
        return ServerConfig.model_validate(InitSettingsSource(ServerConfig, values)())


@contextmanager
def reading() -> Iterator[None]:
    """Turns what is wrong with settings into SettingsError."""
    try:
        yield
    except ValidationError as error:
        raise SettingsError(_told(error)) from error
    except SourceError as error:
        raise SettingsError(str(error)) from error


def _told(error: ValidationError) -> str:
    """One line: each setting, what is wrong with it, and what was given."""
    parts = [(".".join(map(str, part["loc"])), part["msg"], part["input"]) for part in error.errors()]
    return "; ".join(f"{name}: {message} (given: {given!r})" for name, message, given in parts)


def _complete(args: Sequence[str]) -> list[str]:
    """`--canary` without a value is `--canary refuse`."""
    out: list[str] = []
    for at, arg in enumerate(args, 1):
        alone = arg == "--canary" and (at == len(args) or args[at].startswith("-"))
        out += [arg, "refuse"] if alone else [arg]
    return out


def _check_names(environment: Iterable[str]) -> None:
    """A variable that sets nothing is a typo, as a flag or a line of the file would be."""
    prefix = str(ServerConfig.model_config["env_prefix"])
    known = {prefix + name.upper() for name in ServerConfig.model_fields}
    unknown = sorted(name for name in environment if name.upper().startswith(prefix) and name.upper() not in known)
    if unknown:
        raise SettingsError(f"there is no setting for the environment's {', '.join(unknown)}; see --help")
