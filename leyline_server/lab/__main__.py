"""`leyline-lab`: measures what edits do to a checkpoint; prints tables, writes figures and pictures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.console import Console
from rich.progress import track

from leyline_server.lab.config import LabConfig
from leyline_server.lab.figures import Figure, write


def main() -> None:
    """The entry point. Exit status 2 for bad settings, 3 for a model that is refused or can't play the scenes."""
    console = Console(stderr=True)
    try:
        config = LabConfig()
    except (ValidationError, SettingsError) as error:
        console.print(f"[red]leyline-lab:[/] {error}", highlight=False)
        sys.exit(2)
    from leyline_proto.refusal import Refusal
    from leyline_server.lab.laboratory import LabError
    from leyline_server.model.load import ModelRefused
    from leyline_server.model.tokenizer import TokenizerError

    try:
        figures, common = _run(config, console)
    except (ModelRefused, TokenizerError, LabError, Refusal, MemoryError) as error:
        console.print(f"[red]leyline-lab:[/] {error}", highlight=False)
        sys.exit(3)
    config.out.mkdir(parents=True, exist_ok=True)
    write(config.out / "lab.jsonl", figures, common)
    written = [config.out / "lab.jsonl", *_draw(config.out, figures, console)]
    console.print(f"written: {', '.join(map(str, written))}", highlight=False)


def _run(config: LabConfig, console: Console) -> tuple[list[Figure], dict[str, Any]]:
    # torch takes seconds to import: --help and bad settings should not wait for it.
    import torch
    import transformers

    from leyline_server.config import ServerConfig
    from leyline_server.lab import following, report
    from leyline_server.lab.drift import drift
    from leyline_server.lab.invariance import invariance
    from leyline_server.lab.laboratory import Lab
    from leyline_server.lab.scenes import CONTEXTS, text
    from leyline_server.server import build

    with console.status(f"loading {config.model}"):
        parts = build(
            ServerConfig(
                model=config.model,
                device=config.device,
                dtype=config.dtype,
                slots=config.slots,
                threads=config.threads,
                max_queue=256,
            )
        )
    lab = Lab(parts.engine, parts.serving.format, parts.model)

    def progress(items: Iterable[int], what: str, count: int) -> Iterable[int]:
        return track(items, what, count, console=console, disable=not console.is_terminal)

    def ids(seed: int, count: int) -> list[int]:
        return lab.format.encode(text(seed, count))[:count]

    figures: list[Figure] = []
    if "fidelity" in config.measures:
        figures += following.figures(following.measure(lab, config.kinds, config.scenes, config.seed, progress))
    if "told-apart" in config.measures:
        hiding = [kind for kind in following.HIDING if kind in config.kinds]
        figures += following.told_apart(lab, hiding, config.scenes, config.seed, progress)
    if "drift" in config.measures:
        with console.status("drift"):
            figures += drift(lab, ids(config.seed, 800), seed=config.seed)
    if "invariance" in config.measures:
        with console.status("invariance"):
            texts = [ids(config.seed + 1 + number, 128) for number in range(8)]
            contexts = [ids(config.seed + 100 + number, count) for number, count in enumerate(CONTEXTS)]
            figures += invariance(lab, texts, contexts, config.seed)
    report.show(Console(), figures)
    common = {
        "model": config.model,
        "digest": parts.model.digest,
        "device": torch.cuda.get_device_name() if parts.model.device.type == "cuda" else "cpu",
        "dtype": str(parts.model.dtype).removeprefix("torch."),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": shlex.join(["leyline-lab", *sys.argv[1:]]),
    }
    return figures, common


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
        if any(
            figure.bench == bench and figure.metric in plots.NEEDS.get(name, (figure.metric,)) for figure in figures
        ):
            draw(out / name, figures)
            drawn.append(out / name)
    return drawn


if __name__ == "__main__":
    main()
