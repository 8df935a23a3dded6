"""Settings of `leyline-lab`: flags and environment. Owns their names, bounds and help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from pydantic_settings import CliSettingsSource, EnvSettingsSource, InitSettingsSource, SettingsConfigDict

from leyline_server.config import Settings, reading
from leyline_server.lab.scenes import KINDS

Measure = Literal["fidelity", "told-apart", "content", "drift", "invariance"]

_HELP = f"""What an edit does to a model: AMORTIZE, its repairs and FORGET beside the unedited context, in one run.

Prints tables, and writes figures as JSON lines and pictures to --out. Every setting can be a flag or an environment
variable (LEYLINE_LAB_SCENES=100). Scenes: {", ".join(KINDS)}; docs/fidelity.md says what they are."""


def _known(kind: str) -> str:
    if kind not in KINDS:
        raise PydanticCustomError("kind", "none of {kinds}", {"kinds": ", ".join(KINDS)})
    return kind


class LabConfig(Settings):
    __doc__ = _HELP

    model_config = SettingsConfigDict(env_prefix="LEYLINE_LAB_", cli_prog_name="leyline-lab")

    model: str = Field(default="tiny", description="a checkpoint directory, a hub id, 'tiny' or 'notes'")
    device: str = Field(default="auto", description="cpu, cuda, ..; auto takes a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="of weights and cache")
    measures: list[Measure] = Field(
        default=["fidelity", "told-apart", "content", "drift", "invariance"],
        min_length=1,
        description="what is measured",
    )
    scenes: int = Field(default=60, ge=1, description="scenes of each kind")
    kinds: list[Annotated[str, AfterValidator(_known)]] = Field(
        default=list(KINDS), min_length=1, description="kinds of scenes"
    )
    seed: int = Field(default=0, ge=0, description="scenes are drawn from it")
    out: Path = Field(default=Path("lab-out"), description="where figures and pictures go")
    slots: int | None = Field(default=16384, ge=1024, description="tokens the pool holds")
    threads: int | None = Field(default=None, ge=1, description="CPU threads; unset: torch's choice")


def load_config(args: Sequence[str]) -> LabConfig:
    """Reads flags and environment. `--help` prints and exits. Raises SettingsError."""
    with reading():
        flags: CliSettingsSource[LabConfig] = CliSettingsSource(LabConfig, cli_parse_args=list(args))
        values = EnvSettingsSource(LabConfig)() | flags()
        return LabConfig.model_validate(InitSettingsSource(LabConfig, values)())
