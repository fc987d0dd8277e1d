"""Command line of the benchmarks: `python -m bench`, one command per experiment."""

import math
import time
from pathlib import Path

import click

from bench.experiments import causal_lms, parallel, peers, suite
from bench.harness.cli import Output
from bench.harness.records import RESULTS
from bench.report import compare, figures, markdown
from cutefce.ops.primitives import dispatch


@click.group()
@click.option("--output", type=Path, default=RESULTS, help="Folder of the results.")
@click.option("--resume", is_flag=True, help="Skip what these sources have already recorded.")
@click.option("--minutes", type=float, help="Begin no measurement after so many minutes.")
@click.option(
    "--without-kernels", is_flag=True, help="Run as GPUs do that have none of ours, on Triton."
)
@click.pass_context
def main(
    context: click.Context,
    output: Path,
    resume: bool,
    minutes: float | None,
    without_kernels: bool,
) -> None:
    """Measure, print a table, and write the results."""
    if without_kernels:
        dispatch._missing_reason = lambda: "kernels are switched off"
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    context.obj = Output(output, resume, end, without_kernels)


experiments = *suite.EXPERIMENTS, *suite.GPU_EXPERIMENTS, causal_lms, parallel
for module in (suite, *experiments, markdown, figures, compare):
    main.add_command(module.command)
main.add_command(peers.quick)


if __name__ == "__main__":
    main()
