"""What a call costs the host: an eager call without gradients, and a new process's first one."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CALLS = 3000
WARM_UP_SECONDS = 1.0
"""Of calls before those that count: a CPU that was idle needs time to reach its clock."""
FIRST_CALL = """
import time
import torch
import cutefce
from cutefce.cute_kernels import jit_cache
h = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
w = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16)
y = torch.randint(8192, (256,), device="cuda")
torch.mm(h, w.t())
torch.cuda.synchronize()
begin = time.perf_counter()
with torch.no_grad():
    torch.ops.cutefce.loss(h, w, y)
torch.cuda.synchronize()
print(time.perf_counter() - begin, jit_cache.compile_count)
"""


@dataclass(frozen=True)
class Row:
    """Host times of one process."""

    call_us: float
    """Median until an eager call without gradients returns, in microseconds."""
    call_quartiles_us: tuple[float, float]
    torch_us: float
    """The same of `F.cross_entropy(F.linear(h, w), y)`, in turns with it: hosts differ."""
    first_call_s: float
    """Until a new process's first call has its result, with objects in the cache, in seconds."""
    first_call_compiles: int
    """Kernels that this process compiled."""


def run() -> Row:
    """Measure on small inputs, so that the GPU is never waited for."""
    h = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16)
    y = torch.randint(8192, (256,), device="cuda")

    def fused() -> None:
        torch.ops.cutefce.loss(h, w, y)

    def by_torch() -> None:
        F.cross_entropy(F.linear(h, w), y)

    samples: dict[Callable[[], None], list[float]] = {fused: [], by_torch: []}
    end = time.perf_counter() + WARM_UP_SECONDS
    with torch.no_grad():
        while time.perf_counter() < end:
            list(_twenty(fused))
        while len(samples[fused]) < CALLS:
            for call, times in samples.items():
                times += _twenty(call)
    low, median, high = statistics.quantiles(samples[fused], n=4)
    command = [sys.executable, "-c", FIRST_CALL]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return Row(
        median, (low, high), statistics.median(samples[by_torch]), float(text[0]), int(text[1])
    )


def _twenty(call: Callable[[], None]) -> Iterator[float]:
    """Time calls one by one, in microseconds; the GPU is idle at first."""
    torch.cuda.synchronize()
    for _ in range(20):
        begin = time.perf_counter()
        call()
        yield (time.perf_counter() - begin) * 1e6
