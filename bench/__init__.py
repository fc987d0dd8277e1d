"""Benchmarks: `python -m bench COMMAND` measures, prints and records in `bench/results/`."""
