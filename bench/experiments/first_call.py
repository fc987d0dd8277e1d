"""Latency of a new process's first call on a GPU, with its kernels in the JIT cache."""

import dataclasses
import json
import subprocess
import sys
import time
from dataclasses import dataclass

import click
import torch

import cutefce
from bench.harness.cli import Output, gpu_only
from bench.harness.problems import Shape, random_inputs
from bench.harness.records import Measurement
from cutefce.cute_kernels.jit import cache as jit_cache

SHAPE = Shape(256, 512, 8192, "bfloat16")


@dataclass(frozen=True)
class Row:
    """The first call of one process."""

    seconds: float
    """Until the result is there, without imports and creation of the CUDA context."""
    compiled_kernels: int
    """Kernels that this process compiled; 0 if the cache had them all."""


@click.command("first-call")
@click.pass_obj
@gpu_only
def command(output: Output, /) -> None:
    """Latency of a new process's first call on a GPU."""
    output.record("first_call", [Measurement({}, lambda: [run("cuda")])])


def run(device: str) -> Row:
    """Call in a process that fills the cache, then in the one that is measured."""
    for _ in range(2):
        process = subprocess.run(
            [sys.executable, "-m", __name__, device], check=True, capture_output=True, text=True
        )
    return Row(**json.loads(process.stdout))


def first_call(device: str) -> Row:
    """Measure the first call of this process."""
    h, w, y = random_inputs(SHAPE, device)
    torch.mm(h, w.t()).sum().item()  # creates the CUDA context and cuBLAS's
    begin = time.perf_counter()
    with torch.no_grad():
        cutefce.linear_cross_entropy(h, w, y).item()
    return Row(time.perf_counter() - begin, jit_cache.compile_count)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(first_call(sys.argv[1]))))
