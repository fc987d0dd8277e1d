"""All experiments of one GPU in one process, which imports and loads once."""

import time

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
    """Everything that one GPU measures, or a CPU."""
    for module in (*EXPERIMENTS, *(GPU_EXPERIMENTS if DEVICE == "cuda" else ())):
        cutefce.set_strict(False)  # an experiment before may have set it
        begin = time.perf_counter()
        context.invoke(module.command)
        click.echo(f"{module.command.name}: {time.perf_counter() - begin:.0f} s in all")
