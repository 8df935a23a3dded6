"""The package as it is built: what a wheel holds, and what stays out of the SDK's dependencies."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_every_package_is_there_and_typed() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").is_file(), package
        assert (ROOT / package / "py.typed").is_file(), package


def test_source_roots_are_no_packages() -> None:
    """A regular package named `kernels` would shadow Hugging Face's."""
    for root in ("proto", "kernels", "policies"):
        assert not (ROOT / root / "__init__.py").exists(), root


def test_the_sdk_alone_is_light() -> None:
    names = {dependency.split(">")[0].split("=")[0] for dependency in PROJECT["project"]["dependencies"]}
    assert names == {"googleapis-common-protos", "grpcio", "grpcio-status", "protobuf", "tenacity", "xxhash"}


def test_constraints_satisfy_what_the_project_asks_for() -> None:
    pinned = dict(
        line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["server"]]
    for dependency in asked:
        name = dependency.split(">")[0].split("=")[0].split("[")[0].lower()
        assert name in pinned or name.replace("-", "_") in pinned, f"{name} is not pinned"
    assert pinned["torch"] == "2.13.0"
    assert pinned["transformers"] == "5.24.0"


def test_the_embedded_model_ships_within_its_bound() -> None:
    weights = ROOT / "leyline_server" / "assets" / "tiny" / "model.safetensors"
    assert 1e6 < weights.stat().st_size <= 16e6


def test_files_keep_to_their_budget() -> None:
    generated = {"leyline_pb2.py", "leyline_pb2_grpc.py"}
    for package in [*PACKAGES, "demo", "examples", "training"]:
        bound = 400 if package.startswith("kernels") else 300
        for file in (ROOT / package).rglob("*.py"):
            if file.name not in generated:
                assert len(file.read_text().splitlines()) <= bound, file
