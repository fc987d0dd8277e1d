"""The forward where nothing is stored: three kernels, which the host launches by one call.

What lies between them is handed over in one piece of memory, which the host allocates at once:
r (N,), the parts' sums (N, P) and the notes, 4 bytes each.  Calls and allocations are most of what
a forward takes of the host.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import matrix, number, vector
from cutefce.cute_kernels.jit.compiler import traced
from cutefce.cute_kernels.workspace import Stat, forward_semaphore_count


def trace(kernel: spec.FusedForwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    target_logit, (h, w, target, *_, ignored, stream) = traced(kernel.target_logit)
    (project, _), (finish, _) = traced(kernel.sums), traced(kernel.finish)
    stats, reduced = matrix(Float32, len(Stat), h.shape[0], aligned=False), number(Float32)
    between = vector(Float32, cute.sym_int())
    numbers = ignored, Int32(1), Int32(1), Int32(0)
    function = Forward(kernel, target_logit, project, finish)
    return function, (h, w, target, between, stats, reduced, *numbers, stream)


class Forward:
    """The launches, of these host functions."""

    def __init__(
        self, kernel: spec.FusedForwardSpec, target_logit: Any, project: Any, finish: Any
    ) -> None:
        self.config = kernel.config
        self.target_logit, self.project, self.finish = target_logit, project, finish

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        between: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        ignored: Int64,
        windows: Int32,
        clusters: Int32,
        mean: Int32,
        stream: Any,
    ) -> None:
        """Do `target_logit`, `project_exp` over all columns and `finish`."""
        rows, parts = h.shape[0], windows * self.config.partials_per_row
        noted = forward_semaphore_count(rows, self.config.rows)
        logit = cute.make_tensor(between.iterator, cute.make_layout((rows,)))
        behind = between.iterator + rows
        sums = cute.make_tensor(behind, cute.make_layout((rows, parts), stride=(parts, 1)))
        place = cute.recast_ptr(behind + rows * parts, dtype=Int32)
        notes = cute.make_tensor(place, cute.make_layout((noted,)))
        self.target_logit(h, w, target, logit, notes, ignored, stream)
        self.project(h, w, logit, target, sums, None, notes, Int32(0), windows, clusters, stream)
        self.finish(sums, logit, target, stats, reduced, notes, ignored, mean, stream)
