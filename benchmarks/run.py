"""`python -m benchmarks.run NAME ..`: checks a benchmark's result, then times it, prints a table, writes NAME.jsonl.

Without a GPU the same code runs at a toy's sizes, in seconds, and no goal is judged, but in benchmarks without a model:
they are the same everywhere. One model is made for all benchmarks of a run. A benchmark that fails is reported and the
next one runs; the exit status is then 1. Results of an earlier run stay until a new one has a row to take their place.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import tables
from benchmarks.bench import Bench, OutOfTime
from benchmarks.record import Recorder, chosen
from benchmarks.registry import SHAPES, Bed, Shape

NAMES = (
    *("rotate", "decode", "prefill", "forms", "splice", "streams", "interference", "paper_table", "traces", "policy"),
    "content_recovery",
    "content_hits",
)
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    names = list(NAMES) if args.all else args.names
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = SHAPES[args.shape or ("lite" if device.type == "cuda" else "toy")]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    traces = args.traces or (Path(os.environ["LEYLINE_TRACES"]) if os.environ.get("LEYLINE_TRACES") else None)
    if wrong := _wrong(names, device, shape, args.model, traces):
        _parser().error(wrong)
    bed = Bed(shape, device, dtype, args.model, traces)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    command = "python -m benchmarks.run " + shlex.join(argv if argv is not None else sys.argv[1:])
    failed, found, known = [], False, list[str]()
    bed.until = time.monotonic() + (args.budget_s or math.inf)
    for name in names:
        bench: Bench = import_module(f"benchmarks.{name}").BENCH
        if why := unfit(bench, bed):
            console.print(f"[yellow]{name}: left out, {why}[/]")
            continue
        there = bench.cases(bed)
        if args.cases and not any(chosen(case, args.cases) for case in there):
            known += there
            continue
        found = True
        # What is scaled down, or lacks the recordings, never takes the place of real results.
        whole = traces if bench.host else bed.full or args.model
        out = args.out or (RESULTS if whole else RESULTS / shape.name)
        on = (torch.device("cpu"), torch.int32) if bench.host else (device, dtype)
        recorder = Recorder(name, out / f"{name}.jsonl", *on, bench.about or bed.about, command, args.cases)
        started = time.monotonic()
        try:
            if left := run(bench, bed, recorder, console, args.cases):
                console.print(f"[yellow]{name}: left out, {args.budget_s:g} s are over: {'; '.join(left)}[/]")
                failed.append(name)
        except Exception:
            console.print(f"[bold red]{name} failed[/]")
            console.print_exception(width=140, max_frames=12)
            failed.append(name)
            bed.drop()
        if recorder.rows:
            console.print(tables.table(recorder.rows))
            if bench.summary is not None:
                console.print(bench.summary(recorder.rows))
        wrote = out / f"{name}.jsonl" if recorder.rows else "nothing was written"
        console.print(f"[dim]{name}: {time.monotonic() - started:.0f} s, {wrote}[/]")
    if known and not found:
        asked = " or ".join(map(repr, args.cases))
        console.print(f"[bold red]no case has {asked} in its name[/]; there are: {', '.join(known)}")
        return 2
    if failed:
        console.print(f"[bold red]not done: {', '.join(failed)}[/]")
    return 1 if failed else 0


def run(bench: Bench, bed: Bed, recorder: Recorder, console: Console, only: Sequence[str] = ()) -> list[str]:
    """One benchmark: its check, then its cases that `chosen` picks. Returns those, or the parts of one, that it did not
    come to before `bed.until`."""
    begun, cases = time.monotonic(), [case for case in bench.cases(bed) if chosen(case, only)]
    if begun > bed.until:
        return cases
    _say(console, bench, "checking", begun)
    bench.check(bed)
    for number, case in enumerate(cases):
        if time.monotonic() > bed.until:
            return cases[number:]
        _say(console, bench, case, begun)
        try:
            for figure in bench.rows(bed, case):
                whole = bed.shape.full or bench.host
                recorder.add(figure if whole else replace(figure, case=f"{figure.case}, scaled down"))
                value = "-" if figure.value is None else f"{tables.number(figure.value)} {figure.unit}"
                console.print(f"[dim]  {figure.arm}: {figure.metric} {value}[/]")
        except OutOfTime as error:
            return [*error.left, *cases[number + 1 :]]
    return []


def unfit(bench: Bench, bed: Bed) -> str:
    """Why a benchmark can't run here; empty when it can."""
    if bench.needs == "cuda" and bed.device.type != "cuda":
        return "it needs a GPU"
    return bench.missing(bed)


def _wrong(names: Sequence[str], device: torch.device, shape: Shape, model: str | None, traces: Path | None) -> str:
    """What can't be run anywhere, or not on this machine; empty when it can."""
    if not names:
        return "name a benchmark, or --all"
    if unknown := [name for name in names if name not in NAMES]:
        return f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "--device cuda: there is no GPU that torch can use"
    if shape.full and device.type == "cpu":
        return f"--shape {shape.name} needs a GPU: on a CPU it would take some 63 GB of memory, and hours"
    if model and not Path(model).is_dir():
        return f"--model {model}: there is no such directory"
    if traces is not None and not traces.is_dir():
        return f"--traces or LEYLINE_TRACES, {traces}: there is no such directory"
    return ""


def _say(console: Console, bench: Bench, what: str, begun: float) -> None:
    console.print(f"[bold]{bench.name}[/]: {what} [dim]({time.monotonic() - begun:.0f} s)[/]")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--all", action="store_true", help="all of them, in this order")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="default: lite on a GPU, toy on a CPU")
    parser.add_argument("--model", help="a checkpoint directory instead of random weights")
    parser.add_argument("--traces", type=Path, help="recorded conversations (default: LEYLINE_TRACES)")
    parser.add_argument(
        "--cases", nargs="*", default=[], metavar="TEXT", help="only cases with one of these in their name"
    )
    parser.add_argument("--out", type=Path, help="where NAME.jsonl goes")
    parser.add_argument(
        "--budget-s", type=float, default=0, help="start no case, and no arm of a long one, after this many seconds"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
