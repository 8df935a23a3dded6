"""Benchmarks: each first checks its result, then times it beside its rivals. `python -m benchmarks.run --help`."""
