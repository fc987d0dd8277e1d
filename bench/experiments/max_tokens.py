"""The most tokens of a forward and backward that fit in memory, unfused and with cutefce.

The number of tokens is doubled until a step fails, then the midpoint is tried.  Each attempt runs
on random inputs in a child process.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import click
import torch

from bench.harness.cli import DEVICE, Output
from bench.harness.problems import (
    CPU_SHAPE,
    Loss,
    Shape,
    cutefce_loss,
    gradients,
    random_inputs,
)
from bench.harness.records import Measurement
from bench.harness.reference import unfused
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError

SHAPES = {"cpu": CPU_SHAPE, "cuda": Shape(16384, 4096, 131072, "bfloat16")}
"""The first attempt."""
LIMIT = {"cpu": 2048, "cuda": 1 << 25}
"""Tokens of the largest attempt."""
SECONDS = 180
"""Time limit of an attempt."""
LOSSES: dict[str, Loss] = {
    "unfused": unfused,
    "cutefce max": cutefce_loss("max"),
    "cutefce min": cutefce_loss("min"),
}


@dataclass(frozen=True)
class Row:
    """The most tokens of one implementation."""

    hidden: int
    vocab: int
    implementation: str
    tokens: int
    """Of the largest attempt that succeeded; 0 if none did."""
    peak_mib: float | None
    """Peak memory of that attempt in MiB beyond the inputs, including the gradients."""
    failed_tokens: int | None
    """Of the smallest attempt that failed."""
    note: str
    """Why that attempt failed, or that none did."""


@click.command("max-tokens")
@click.pass_obj
def command(output: Output, /) -> None:
    """The most tokens of a forward and backward that fit in memory."""
    measurements = [
        Measurement({"implementation": name}, functools.partial(run, name, DEVICE))
        for name in LOSSES
    ]
    output.record("max_tokens", measurements)


def run(name: str, device: str) -> list[Row]:
    """Find the most tokens of the implementation `name`, a key of `LOSSES`."""
    shape, limit = SHAPES[device], LIMIT[device]
    with SubprocessWorker() as child:

        def peak_mib(tokens: int) -> float:
            call = functools.partial(attempt, name, replace(shape, tokens=tokens), device)
            return child.ask(call, SECONDS)

        return [Row(shape.hidden, shape.vocab, name, *most_tokens(peak_mib, shape.tokens, limit))]


def most_tokens(
    peak_mib: Callable[[int], float], first: int, limit: int
) -> tuple[int, float | None, int | None, str]:
    """Return the last four columns of a row; `peak_mib` raises a `WorkerError` if it fails."""
    tokens = 0
    peak: float | None = None
    failed: int | None = None
    note = f"no more than {limit} tokens were tried"

    def fits(number: int) -> bool:
        nonlocal tokens, peak, failed, note
        try:
            peak = peak_mib(number)
        except WorkerError as error:
            failed = number
            note = "out of memory" if error.is_out_of_memory else str(error)
            return False
        tokens = number
        return True

    number = first
    while number <= limit and fits(number):
        number *= 2
    if tokens and failed:
        fits(tokens * 3 // 2)
    return tokens, peak, failed, note


def attempt(name: str, shape: Shape, device: str) -> float:
    """Run a step of the implementation `name`; return its peak memory in MiB."""
    if device != "cpu":
        torch.cuda.empty_cache()  # as in a new process
    h, w, y = random_inputs(shape, device)
    return peak_bytes(lambda: gradients(LOSSES[name], h, w, y), device) / 2**20
