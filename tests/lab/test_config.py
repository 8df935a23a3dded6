"""The lab's settings: flags over the environment; whatever is wrong with them is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyline_server.config import SettingsError
from leyline_server.lab.config import LabConfig, load_config
from leyline_server.lab.scenes import KINDS


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LabConfig.model_fields:
        monkeypatch.delenv(f"LEYLINE_LAB_{name.upper()}", raising=False)


def test_what_is_not_said_has_a_default() -> None:
    config = load_config([])
    assert config == LabConfig()
    assert config.kinds == list(KINDS)
    assert config.measures == ["fidelity", "told-apart", "content", "drift", "invariance"]
    assert (config.model, config.scenes, config.out) == ("tiny", 60, Path("lab-out"))


def test_lists_are_repeated_or_separated_by_commas() -> None:
    config = load_config(
        ["--kinds", "pointer removed", "--kinds", "removed (8 edits)", "--measures", "drift,invariance"]
    )
    assert (config.kinds, config.measures) == (["pointer removed", "removed (8 edits)"], ["drift", "invariance"])


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYLINE_LAB_SCENES", "7")
    monkeypatch.setenv("LEYLINE_LAB_SEED", "8")
    config = load_config(["--seed", "9"])
    assert (config.scenes, config.seed) == (7, 9)
    assert LabConfig().scenes == 60, "load_config alone reads the environment"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--scenes", "0"], "scenes: Input should be greater than or equal to 1 (given: '0')"),
        (["--kinds", "removed,speed"], f"kinds.1: none of {', '.join(KINDS)} (given: 'speed')"),
        (["--measures", "speed"], "measures.0: Input should be 'fidelity', 'told-apart', 'content', 'drift' or "),
        (["--dtype", "float16"], "dtype: "),
    ],
)
def test_a_bad_setting_is_one_line(args: list[str], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_config(args)
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("SCENES", "many", "scenes: .* unable to parse"), ("KINDS", "removed", '"kinds"'), ("KINDS", "[]", "kinds: ")],
)
def test_a_bad_variable_is_one_line(name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LEYLINE_LAB_{name}", value)
    with pytest.raises(SettingsError, match=told):
        load_config([])


def test_help_names_every_setting_and_kind(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        load_config(["--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in LabConfig.model_fields:
        assert f"--{name}" in text
    for kind in KINDS:
        assert kind in text
