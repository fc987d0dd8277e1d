"""Forward and backward of a loss sharded over ranks, against the same on one rank.

unsharded           forward and backward with the whole weight, on every rank independently
tp                  vocabulary parallel: every rank has a shard of the weight
sp                  the same, and every rank has a shard of the hidden states

Run by torchrun, on GPUs with NCCL or on a CPU with gloo.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

import cutefce
from bench.harness.cli import (
    DEVICE,
    Output,
    chosen_shape,
    shape_options,
    slug,
)
from bench.harness.problems import CPU_SHAPE, Shape, ignore_some, random_inputs
from bench.harness.records import Measurement
from bench.harness.timing import Timing, interleaved, peak_bytes, preceding_gemms

SHAPES = {"cpu": CPU_SHAPE, "cuda": Shape(32768, 4096, 262144, "bfloat16")}
MODES = ("tp", "sp")

Step = Callable[[], tuple[Tensor, ...]]
"""Returns loss, dX and dW, or this rank's rows of them."""


@dataclass(frozen=True)
class Row:
    """One implementation; times are medians of interleaved runs, each of the slowest rank."""

    implementation: str
    ranks: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_unsharded: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and the gradients."""
    loss_difference: float
    """Relative to "unsharded", in the Euclidean norm; so are the next two."""
    dx_difference: float
    dw_difference: float


@click.command("parallel")
@shape_options
@click.option("--repeats", type=click.IntRange(min=1), default=20, help="Timed rounds.")
@click.option("--workspace", help='Bytes, "min" or "max".')
@click.option(
    "--ignored-percent", type=click.IntRange(0, 99), default=0, help="Targets ignored, at random."
)
@click.pass_obj
def command(
    output: Output, /, repeats: int, workspace: str | None, ignored_percent: int, **sizes: Any
) -> None:
    """A sharded forward and backward, against one device; run by torchrun."""
    shape = chosen_shape(SHAPES[DEVICE], sizes)
    budget = int(workspace) if workspace and workspace.isdigit() else workspace
    ignored = f"_{ignored_percent}_percent_ignored" if ignored_percent else ""
    with joined_group(DEVICE) as (rank, ranks):
        rows = run(shape, DEVICE, repeats, budget, ignored_percent)
        if rank == 0:
            output.record(
                f"parallel_{ranks}_ranks_{slug(shape)}{ignored}",
                [Measurement({}, lambda: rows)],
                shape=dataclasses.asdict(shape),
                workspace=budget,
                ignored_percent=ignored_percent,
            )


@contextmanager
def joined_group(device: str) -> Iterator[tuple[int, int]]:
    """Join the process group that torchrun started; give this rank and the number of ranks."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def run(
    shape: Shape, device: str, repeats: int, workspace: int | str | None, ignored_percent: int = 0
) -> list[Row]:
    """Measure every implementation on random inputs, the same on every rank."""
    steps = _steps(shape, device, workspace, ignored_percent)
    results = {name: step() for name, step in steps.items()}
    differences = {name: _differences(name, results[name], results["unsharded"]) for name in steps}
    gradient_bytes = {name: sum(x.nbytes for x in result[1:]) for name, result in results.items()}
    results.clear()
    layers = preceding_gemms(device)

    def before() -> None:
        if layers is not None:
            layers()
        dist.all_reduce(torch.zeros(1, device=device))  # ranks start together

    times = interleaved(steps, device, repeats, before=before)
    peaks = {name: peak_bytes(steps[name], device) - gradient_bytes[name] for name in steps}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (times, peaks, differences))

    def slowest(name: str) -> Timing:
        samples = (times[name].samples_ms for times, _, _ in of_ranks)
        return Timing(tuple(map(max, zip(*samples, strict=True))))

    unsharded_ms = slowest("unsharded").median_ms
    rows = []
    for name in steps:
        time = slowest(name)
        loss, dx, dw = (max(found[name][i] for _, _, found in of_ranks) for i in range(3))
        rows.append(
            Row(
                implementation=name,
                ranks=len(of_ranks) if name in MODES else 1,
                median_ms=time.median_ms,
                quartiles_ms=time.quartiles_ms,
                ratio_to_unsharded=time.median_ms / unsharded_ms,
                peak_mib=max(peaks[name] for _, peaks, _ in of_ranks) / 2**20,
                loss_difference=loss,
                dx_difference=dx,
                dw_difference=dw,
            )
        )
    return rows


def _steps(
    shape: Shape, device: str, workspace: int | str | None, ignored_percent: int
) -> dict[str, Step]:
    """Return the implementations by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if shape.vocab % ranks or shape.tokens % ranks:
        raise ValueError(f"got {shape}, expected tokens and vocab in multiples of {ranks}")
    torch.manual_seed(0)
    h, w, y = random_inputs(shape, device)
    y = ignore_some(y, ignored_percent)
    own_h, own_w = (x.chunk(ranks)[rank].clone() for x in (h, w))
    for x in (h, w, own_h, own_w):
        x.requires_grad_()

    def make_step(h: Tensor, w: Tensor, **sharing: Any) -> Step:
        def step() -> tuple[Tensor, ...]:
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace, **sharing)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        return step

    group = dist.group.WORLD
    return {
        "unsharded": make_step(h, w),
        "tp": make_step(h, own_w, group=group),
        "sp": make_step(own_h, own_w, group=group, sequence_parallel=True),
    }


def _differences(
    name: str, result: tuple[Tensor, ...], unsharded: tuple[Tensor, ...]
) -> tuple[float, ...]:
    """Return relative differences of loss, dX and dW from the same rows of "unsharded"."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss, dx, dw = unsharded
    if name in MODES:
        dw = dw.chunk(ranks)[rank]
    if name == "sp":
        dx = dx.chunk(ranks)[rank]
    pairs = zip(result, (loss, dx, dw), strict=True)
    return tuple(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
