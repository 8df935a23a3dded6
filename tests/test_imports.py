"""The import arrow: policies -> sdk -> proto <- server -> kernels. Nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "leyline_policies": ROOT / "policies" / "leyline_policies",
    "leyline_sdk": ROOT / "leyline_sdk",
    "leyline_proto": ROOT / "proto" / "leyline_proto",
    "leyline_server": ROOT / "leyline_server",
    "leyline_kernels": ROOT / "kernels" / "leyline_kernels",
}
ARROW = {
    "leyline_policies": {"leyline_sdk"},
    "leyline_sdk": {"leyline_proto"},
    "leyline_proto": set(),
    "leyline_server": {"leyline_proto", "leyline_kernels"},
    "leyline_kernels": set(),
}
HEAVY = {"numpy", "safetensors", "tokenizers", "torch", "transformers", "triton"}
LIGHT = ("leyline_policies", "leyline_sdk", "leyline_proto")
UNSHIPPED = {"benchmarks", "demo", "examples", "tests", "training"}


@cache
def _imports(package: str) -> list[tuple[str, str]]:
    """(place, top-level module) of every import in a package, wherever in a file it stands."""
    return list(_read(package))


def _read(package: str) -> Iterator[tuple[str, str]]:
    for file in sorted(PACKAGES[package].rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            place = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield from ((place, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{place}: a relative import"
                yield place, (node.module or "").partition(".")[0]
            elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                yield place, ast.literal_eval(node.args[0]).partition(".")[0] if _literal(node) else "?"


def _literal(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[0], ast.Constant)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arrow(package):
    allowed = {package, *ARROW[package]}
    seen = _imports(package)
    assert seen, "nothing was read"
    wrong = [f"{place} imports {name}" for place, name in seen if name in PACKAGES and name not in allowed]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_ships_needs_what_does_not(package):
    assert not [f"{place} imports {name}" for place, name in _imports(package) if name in UNSHIPPED]


@pytest.mark.parametrize("package", LIGHT)
def test_the_client_side_names_nothing_heavy(package):
    assert not [f"{place} imports {name}" for place, name in _imports(package) if name in HEAVY]


def test_book_keeping_names_no_model_code():
    """Slots, tree, kept rows, lists and plans are integers: torch stands in what lies on the device alone."""
    own = {"leyline_server/cache/pool.py", "leyline_server/cache/request_table.py"}
    found = {place.partition(":")[0] for place, name in _imports("leyline_server") if name in HEAVY - {"numpy"}}
    books = {file for file in found if file.startswith(("leyline_server/cache", "leyline_server/edit"))}
    assert books == own


@pytest.mark.parametrize("package", LIGHT)
def test_importing_the_client_side_loads_nothing_heavy(package):
    """A test of what is loaded, not of time: without these it takes well under 0.3 s."""
    paths = [str(ROOT), *(str(ROOT / source) for source in ("proto", "kernels", "policies"))]
    code = f"import sys; sys.path[:0] = {paths!r}; import {package}; print(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    modules = {name.partition(".")[0] for name in out.stdout.split()}
    assert package in modules
    assert not modules & HEAVY
    assert not modules & {"leyline_server", "leyline_kernels"}
