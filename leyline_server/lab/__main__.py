"""`leyline-lab`: measures what edits do to a checkpoint; prints tables, writes figures and pictures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from leyline_server.config import SettingsError
from leyline_server.lab.config import LabConfig, load_config
from leyline_server.lab.figures import Figure, write
from leyline_server.terminal import complain, no_bars_in_a_log

if TYPE_CHECKING:
    from leyline_server.server import Parts

_TABLES = 100  # columns, where nobody's terminal says how many there are


def main() -> None:
    """The entry point. Exit status 2 for bad settings, 3 for a model that is refused or of which nothing can be
    measured. A measure that it can't take is told and skipped."""
    console = Console(stderr=True)
    try:
        config = load_config(sys.argv[1:])
        config.out.mkdir(parents=True, exist_ok=True)  # not after an hour
    except SettingsError as error:
        _complain(console, error)
        sys.exit(2)
    except OSError as error:
        _complain(console, f"out: {error}")
        sys.exit(2)
    sys.exit(_run(config, console))


def _run(config: LabConfig, console: Console) -> int:
    # torch takes seconds to import: --help and bad settings should not wait for it.
    with console.status(f"loading {escape(config.model)}"):
        import torch

        from leyline_server.lab import measures, report
        from leyline_server.lab.laboratory import Lab
        from leyline_server.model.load import ModelRefused
        from leyline_server.model.tokenizer import TokenizerError

        try:
            served = _build(config)
        except (ModelRefused, TokenizerError, MemoryError, torch.OutOfMemoryError) as error:
            _complain(console, f"the model is refused: {error}")
            return 3
        except SettingsError as error:
            _complain(console, error)
            return 2
    lab = Lab(served.engine, served.serving.format, served.model)
    common, path = _common(served), config.out / "lab.jsonl"

    def progress(items: Iterable[int], what: str, count: int) -> Iterable[int]:
        return track(items, what, count, console=console, disable=not console.is_terminal)

    def tell(what: str) -> None:
        console.print(what, markup=False, highlight=False, soft_wrap=True)

    figures: list[Figure] = []
    chosen = measures.parts(config, lab, served.serving.limits.max_context, progress)
    for measured in measures.run(chosen, tell, lambda what: _complain(console, f"skipped: {what}")):
        figures += measured
        write(path, figures, common)  # each time: a later part may take an hour, or end the run
    if not figures:
        _complain(console, "nothing could be measured")
        return 3
    tables = Console()
    if not tables.is_terminal:
        tables.width = max(tables.width, _TABLES)
    report.show(tables, figures)
    written = [path, *_draw(config.out, figures, console)]
    tell(f"written: {', '.join(map(str, written))}")
    return 0


def _build(config: LabConfig) -> Parts:
    from leyline_server.config import ServerConfig
    from leyline_server.server import build

    no_bars_in_a_log()
    return build(
        ServerConfig(
            model=config.model,
            device=config.device,
            dtype=config.dtype,
            slots=config.slots,
            threads=config.threads,
            max_queue=256,
        )
    )


def _common(served: Parts) -> dict[str, Any]:
    """What every row says beside its figure."""
    import torch
    import transformers

    model = served.model
    return {
        "model": served.config.model,
        "digest": model.digest,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": shlex.join(["leyline-lab", *sys.argv[1:]]),
    }


def _draw(out: Path, figures: list[Figure], console: Console) -> list[Path]:
    if find_spec("matplotlib") is None:
        console.print('no pictures: they need matplotlib (the extra "bench")')
        return []
    from leyline_server.lab import plots

    drawn = []
    for name, bench, draw in (
        ("following.png", "fidelity", plots.draw_following),
        ("dial.png", "fidelity", plots.draw_dial),
        ("drift.png", "drift", plots.draw_drift),
        ("invariance.png", "invariance", plots.draw_invariance),
    ):
        metrics = {figure.metric for figure in figures if figure.bench == bench}
        if metrics.intersection(plots.NEEDS.get(name, metrics)):
            draw(out / name, figures)
            drawn.append(out / name)
    return drawn


def _complain(console: Console, error: object) -> None:
    complain(console, "leyline-lab", " ".join(str(error).split()))


if __name__ == "__main__":
    main()
