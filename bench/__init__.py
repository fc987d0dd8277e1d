"""Benchmarks: `python -m bench` measures and prints, and writes its data to `bench/results/`."""
