"""Where the time of a step goes, from the profiler's times of its kernels.

whole              the step in turns with the plain products, without the profiler
forward product    project_exp, which includes the epilogue: logits, and their exponentials
epilogue           of that, what the plain product of cuBLAS does not take in the same minute; it
                   is negative where cuBLAS is slower, and where logits are computed twice it holds
                   their second product
gradient products  the project's kernels of dX and dW, and those of cuBLAS
products           on a CPU, all of them
glue               all other kernels
idle               between the first kernel and the last, with none running
host               until the call returns, with nothing on the GPU to wait for
"""

import functools
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.harness.problems import SMALL, Shape, gradients, logits_gradient, ours, random_head
from bench.harness.timing import Call, interleaved

SHAPES = {
    "cpu": (SMALL,),
    "cuda": tuple(
        Shape(tokens, hidden, vocab, "bfloat16")
        for tokens, hidden, vocab in ((8192, 4096, 131072), (8192, 2304, 256000))
    ),
}
WORKSPACES = ("max", "min")
STEPS = 5
"""Under the profiler, one after another."""
CPU_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


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
    """Of the sum of all kernels and gaps; of the whole, for "whole" and "host"."""
    tflops: float | None
    """The least operations of these products over the time, whatever is computed again."""
    cublas_tflops: float | None
    """Rate of the same products by cuBLAS in the same minute."""


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Profile a step with most and least workspace on fresh random data."""
    h, w, y = random_head(shape, device)
    g = logits_gradient(h, w, y)
    steps: dict[str, Call] = {
        workspace: functools.partial(gradients, ours(workspace), h, w, y)
        for workspace in WORKSPACES
    }
    forms: dict[str, Call] = {
        **steps,
        "forward product": lambda: torch.mm(h, w.t()),
        "gradient products": lambda: (torch.mm(g, w), torch.mm(g.t(), h)),
    }
    times = {name: t.median_ms for name, t in interleaved(forms, device, repeats).items()}
    times["products"] = times["forward product"] + times["gradient products"]
    times["whole"] = times["products"]
    flop = {"forward product": 1, "gradient products": 2, "products": 3, "whole": 3}
    rows = []
    for workspace, step in steps.items():
        whole, parts = times[workspace], _parts(step, device)
        total = sum(parts.values())
        shares = {"whole": (whole, 1.0)} | {p: (ms, ms / total) for p, ms in parts.items()}
        if "forward product" in parts:
            epilogue = parts["forward product"] - times["forward product"]
            shares["epilogue"] = epilogue, epilogue / total
        host = _host_ms(step, device)
        shares["host"] = host, host / whole
        for part, (ms, share) in shares.items():
            counted = flop[part] * shape.product_flop / 1e9 if part in flop else None
            rows.append(
                Row(
                    shape.tokens,
                    shape.hidden,
                    shape.vocab,
                    workspace,
                    part,
                    ms,
                    share,
                    tflops=counted / ms if counted else None,
                    cublas_tflops=counted / times[part] if counted else None,
                )
            )
    return rows


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
            part = "products" if average.key in CPU_PRODUCTS else "glue"
            milliseconds[part] += average.self_cpu_time_total / 1e3 / STEPS
        return dict(milliseconds)
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    kernels = [
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in results.events()
        if e.device_type().name == "CUDA"
    ]
    return {part: ns / 1e6 / STEPS for part, ns in shared_out(kernels).items()}


def shared_out(kernels: Sequence[tuple[int, int, str]]) -> dict[str, int]:
    """Return the time of each part of kernels with these starts, ends and names.

    Kernels begin early, and wait for the one before: what they have together is that one's.
    """
    taken: Counter[str] = Counter()
    before = min(start for start, _, _ in kernels)
    for start, end, name in sorted(kernels):
        begin = max(start, before)
        taken["idle"] += begin - before
        taken[part_of(name)] += max(0, end - begin)
        before = max(end, begin)
    return dict(taken)


def part_of(kernel: str) -> str:
    """Return the part of a step that a GPU's kernel belongs to, by its name."""
    if "project_exp" in kernel:
        return "forward product"
    products = "gradient_sm", "nvjet", "gemm", "xmma"
    return "gradient products" if any(name in kernel for name in products) else "glue"


def _host_ms(step: Call, device: str) -> float:
    samples = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        samples.append((time.perf_counter() - begin) * 1e3)
        if device != "cpu":
            torch.cuda.synchronize()
    return statistics.median(samples)
