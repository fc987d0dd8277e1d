"""Where the time of a step goes, from the profiler's times of its kernels.

total           the step, interleaved with the plain GEMMs, without the profiler
forward GEMM    project_exp with its epilogue: logits and their exponentials
epilogue        forward GEMM minus the plain GEMM by cuBLAS in the same run; negative where cuBLAS
                is slower, and including the second GEMM where logits are computed twice
gradient GEMMs  the kernels of dX and dW, by cutefce or cuBLAS
GEMMs           all of them, on a CPU
other kernels   everything else
GPU idle        gaps between the first and the last kernel
CPU overhead    until the call returns, with an idle GPU
"""

import functools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness.cli import DEVICE, Output, per_shape, repeats_option
from bench.harness.problems import (
    CPU_SHAPE,
    Shape,
    cutefce_loss,
    gradients,
    logits_gradient,
    random_inputs,
)
from bench.harness.timing import Call, interleaved, preceding_gemms

SHAPES = {
    "cpu": (CPU_SHAPE,),
    "cuda": (Shape(8192, 4096, 131072, "bfloat16"), Shape(8192, 2304, 256000, "bfloat16")),
}
WORKSPACES = ("max", "min")
STEPS = 5
"""Consecutive steps under the profiler."""
CPU_GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
GEMMS_OF = {"forward GEMM": 1, "gradient GEMMs": 2, "GEMMs": 3, "total": 3}
"""How many of the three GEMMs a part of the step holds."""


@dataclass(frozen=True)
class Row:
    """One part of a step at one shape."""

    tokens: int
    hidden: int
    vocab: int
    workspace: str
    part: str
    ms: float
    share: float
    """Of the sum of all kernels and gaps; of the total, for "total" and "CPU overhead"."""
    tflops: float | None
    """Operations of these GEMMs, without recomputation, over the time."""
    cublas_tflops: float | None
    """Rate of the same GEMMs by cuBLAS in the same run."""


@click.command("breakdown")
@repeats_option(9)
@click.pass_obj
def command(output: Output, /, repeats: int) -> None:
    """Where the time of a step goes."""
    measure = functools.partial(run, device=DEVICE, repeats=repeats)
    output.record("breakdown", per_shape(SHAPES[DEVICE], measure))


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Profile a step with the largest and the smallest workspace on random inputs."""
    h, w, y = random_inputs(shape, device)
    g = logits_gradient(h, w, y)
    steps: dict[str, Call] = {
        workspace: functools.partial(gradients, cutefce_loss(workspace), h, w, y)
        for workspace in WORKSPACES
    }
    calls: dict[str, Call] = {
        **steps,
        "forward GEMM": lambda: torch.mm(h, w.t()),
        "gradient GEMMs": lambda: (torch.mm(g, w), torch.mm(g.t(), h)),
    }
    timings = interleaved(calls, device, repeats, before=preceding_gemms(device))
    times = {name: timing.median_ms for name, timing in timings.items()}
    times["GEMMs"] = times["total"] = times["forward GEMM"] + times["gradient GEMMs"]
    rows = []
    for workspace, step in steps.items():
        for part, (ms, share) in _shares(step, times[workspace], times, device).items():
            flop = GEMMS_OF[part] * shape.gemm_flop / 1e9 if part in GEMMS_OF else None
            rows.append(
                Row(
                    shape.tokens,
                    shape.hidden,
                    shape.vocab,
                    workspace,
                    part,
                    ms,
                    share,
                    tflops=flop / ms if flop else None,
                    cublas_tflops=flop / times[part] if flop else None,
                )
            )
    return rows


def _shares(
    step: Call, total_ms: float, gemm_ms: dict[str, float], device: str
) -> dict[str, tuple[float, float]]:
    """Return milliseconds and share of each part of a step."""
    parts = _parts(step, device)
    profiled = sum(parts.values())
    shares = {"total": (total_ms, 1.0)} | {p: (ms, ms / profiled) for p, ms in parts.items()}
    if "forward GEMM" in parts:
        epilogue = parts["forward GEMM"] - gemm_ms["forward GEMM"]
        shares["epilogue"] = epilogue, epilogue / profiled
    overhead = _cpu_overhead_ms(step, device)
    shares["CPU overhead"] = overhead, overhead / total_ms
    return shares


def _parts(step: Call, device: str) -> dict[str, float]:
    """Return the milliseconds of each part of a step."""
    cuda = device != "cpu"
    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    milliseconds: Counter[str] = Counter()
    if not cuda:
        for average in profiler.key_averages():
            part = "GEMMs" if average.key in CPU_GEMMS else "other kernels"
            milliseconds[part] += average.self_cpu_time_total / 1e3 / STEPS
        return dict(milliseconds)
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    kernels = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in results.events()
        if e.device_type().name == "CUDA"
    ]
    return {part: ns / 1e6 / STEPS for part, ns in time_by_part(kernels).items()}


def time_by_part(kernels: Sequence[tuple[int, int, str]]) -> dict[str, int]:
    """Return the time of each part of a step from its kernels' (start, end, name).

    A kernel may start early and wait for the previous one: their overlap counts for the previous.
    """
    times: Counter[str] = Counter()
    previous_end = min(start for start, _, _ in kernels)
    for start, end, name in sorted(kernels):
        begin = max(start, previous_end)
        times["GPU idle"] += begin - previous_end
        times[part_of(name)] += max(0, end - begin)
        previous_end = max(end, begin)
    return dict(times)


def part_of(kernel: str) -> str:
    """Return the part of a step that a GPU kernel belongs to, by its name."""
    if "ProjectExpSm" in kernel:
        return "forward GEMM"
    gradient_gemms = "GradGemmSm", "nvjet", "gemm", "xmma"
    return "gradient GEMMs" if any(name in kernel for name in gradient_gemms) else "other kernels"


def _cpu_overhead_ms(step: Call, device: str) -> float:
    samples = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        samples.append((time.perf_counter() - begin) * 1e3)
        if device != "cpu":
            torch.cuda.synchronize()
    return statistics.median(samples)
