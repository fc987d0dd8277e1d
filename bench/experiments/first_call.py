"""Latency of first steps on a GPU: with an empty cache, of another head, in a new process.

The last process has an empty cache and the kernels of a wheel: those that the first one compiled,
in the place of the package's own.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import torch

import cutefce
from bench.harness.cli import Output, gpu_only
from bench.harness.problems import Shape, random_inputs
from bench.harness.records import Measurement
from cutefce.cute_kernels.jit import cache

SHAPES = Shape(4096, 2048, 128256, "bfloat16"), Shape(8192, 4096, 131072, "bfloat16")
HEADS = "first head", "another head"


@dataclass(frozen=True)
class Row:
    """The first forward and backward of a head in a process."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    case: str
    """Which process it is, and which head of it."""
    seconds: float
    """Until the gradients are there, without imports and creation of the CUDA context."""
    kernels: int
    """Kernels in the cache folder afterwards."""


@click.command("first-call")
@click.pass_obj
@gpu_only
def command(output: Output, /) -> None:
    """Latency of the first steps of a process on a GPU."""
    output.record("first_call", [Measurement({}, lambda: run("cuda"))])


def run(device: str) -> list[Row]:
    """Train a step of each head in processes, whose kernels are none, the first's, and a wheel's.

    Raises:
        RuntimeError: if kernels were compiled beside those of the wheel.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        for process, cache_dir, more in (
            ("empty cache", folder, ()),
            ("new process", folder, ()),
            ("kernels of a wheel", empty, (folder,)),
        ):
            done = subprocess.run(
                [sys.executable, "-m", __name__, device, *more],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"CUTEFCE_CACHE_DIR": cache_dir},
            )
            heads = zip(SHAPES, HEADS, json.loads(done.stdout), strict=True)
            for shape, head, (seconds, kernels) in heads:
                if more and kernels:
                    raise RuntimeError(f"kernels: compiled {kernels} beside those of the wheel")
                case = f"{process}, {head}"
                rows.append(
                    Row(**dataclasses.asdict(shape), case=case, seconds=seconds, kernels=kernels)
                )
    return rows


def first_steps(device: str, prebuilt: str | None = None) -> list[tuple[float, int]]:
    """Measure the first step of each head in this process; `prebuilt` is a folder of kernels."""
    if prebuilt is not None:
        cache.PREBUILT_FOLDER = Path(prebuilt)
    torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device)).sum().item()
    found = []
    for shape in SHAPES:
        h, w, y = random_inputs(shape, device)
        h.requires_grad_()
        w.requires_grad_()
        begin = time.perf_counter()
        cutefce.linear_cross_entropy(h, w, y).backward()
        assert w.grad is not None
        w.grad[0, 0].item()
        seconds = time.perf_counter() - begin
        kernels = len([*Path(os.environ["CUTEFCE_CACHE_DIR"]).rglob("*.so")])
        found.append((seconds, kernels))
    return found


if __name__ == "__main__":
    print(json.dumps(first_steps(*sys.argv[1:])))
