"""Command line of the benchmarks: `python -m bench`, one command per experiment."""

from pathlib import Path

import click

from bench.experiments import (
    accumulation,
    breakdown,
    causal_lms,
    compiled_step,
    cpu_overhead,
    divergence,
    few_tokens,
    first_call,
    forward,
    loss_curves,
    max_tokens,
    options,
    paper_grid,
    parallel,
    peers,
    sampled,
    sampled_curves,
    stability,
    steady_state,
    step,
    training_step,
    tuned,
)
from bench.harness.cli import Output
from bench.harness.records import RESULTS
from bench.report import compare, markdown, merge
from cutefce.ops.primitives import dispatch


@click.group()
@click.option("--output", type=Path, default=RESULTS, help="Folder of the results.")
@click.option("--resume", is_flag=True, help="Skip what these sources have already recorded.")
@click.option(
    "--without-kernels", is_flag=True, help="Run as GPUs do that have none of ours, on Triton."
)
@click.pass_context
def main(context: click.Context, output: Path, resume: bool, without_kernels: bool) -> None:
    """Measure, print a table, and write the results."""
    if without_kernels:
        dispatch._device_unsupported_reason = lambda *_: "kernels are switched off"
    context.obj = Output(output, resume, "_without_kernels" if without_kernels else "")


for module in (
    paper_grid,
    step,
    training_step,
    peers,
    steady_state,
    max_tokens,
    breakdown,
    stability,
    loss_curves,
    forward,
    few_tokens,
    cpu_overhead,
    compiled_step,
    options,
    accumulation,
    divergence,
    sampled,
    sampled_curves,
    causal_lms,
    first_call,
    tuned,
    parallel,
    markdown,
    compare,
    merge,
):
    main.add_command(module.command)


if __name__ == "__main__":
    main()
