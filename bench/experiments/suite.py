"""All experiments of one GPU in one process, which imports and loads once."""

import time
import traceback

import click

import cutefce
from bench.experiments import (
    accumulation,
    cpu_overhead,
    divergence,
    first_call,
    forward,
    options,
    peers,
    sampled,
    sampled_curves,
    stability,
    training_step,
)
from bench.harness.cli import DEVICE

EXPERIMENTS = (
    peers,
    training_step,
    sampled,
    options,
    accumulation,
    divergence,
    stability,
    sampled_curves,
)
GPU_EXPERIMENTS = forward, cpu_overhead, first_call
"""Experiments that a CPU does not run."""


@click.command("all")
@click.pass_context
def command(context: click.Context) -> None:
    """Everything that one GPU measures, or a CPU; fail at the end if an experiment failed."""
    failed = []
    for module in (*EXPERIMENTS, *(GPU_EXPERIMENTS if DEVICE == "cuda" else ())):
        cutefce.set_strict(False)  # an experiment before may have set it
        begin = time.perf_counter()
        try:
            context.invoke(module.command)
        except click.ClickException:
            raise  # the time is over
        except Exception:  # the others may run
            click.echo(traceback.format_exc())
            failed.append(module.command.name)
        click.echo(f"{module.command.name}: {time.perf_counter() - begin:.0f} s in all")
    if failed:
        raise click.ClickException(f"failed, as said above: {', '.join(failed)}")
