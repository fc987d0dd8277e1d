"""The forward without stored exponentials: three kernels launched by one host function.

One host call and one allocation minimize CPU overhead.  The workspace, which the host allocates,
holds r (N,), the partial sums (N, P) and the semaphores, in elements of 4 bytes.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import matrix, scalar, vector
from cutefce.cute_kernels.common.logit_transform import Transform
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.workspace import NUM_STATS, forward_semaphore_count


def compile_signature(kernel: spec.FusedForwardSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and the arguments to compile it for."""
    target_logit, inputs = compiler.compile_signature(kernel.target_logit)
    project_exp, _ = compiler.compile_signature(kernel.row_sums)
    reduce_partials, _ = compiler.compile_signature(kernel.reduce_partials)
    h, w, target, *_, transform, ignored, stream = inputs
    workspace = vector(Float32, cute.sym_int())
    stats, reduced = matrix(Float32, NUM_STATS, h.shape[0], aligned=False), scalar(Float32)
    numbers = ignored, Int32(1), Int32(1), Int32(0)
    function = FusedForward(kernel, target_logit, project_exp, reduce_partials)
    return function, (h, w, target, workspace, stats, reduced, transform, *numbers, stream)


class FusedForward:
    """The launches of the three kernels' host functions."""

    def __init__(
        self, kernel: spec.FusedForwardSpec, target_logit: Any, project_exp: Any, reduce: Any
    ) -> None:
        self.config = kernel.config
        self.target_logit, self.project_exp, self.reduce = target_logit, project_exp, reduce

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        target: cute.Tensor,
        workspace: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        transform: Transform | None,
        ignored: Int64,
        vocab_splits: Int32,
        clusters: Int32,
        mean: Int32,
        stream: Any,
    ) -> None:
        """Run `target_logit`, `project_exp` over all columns and `reduce_partials`.

        Each parameter is one argument that the host passes by position.
        """
        rows, partials = h.shape[0], vocab_splits * self.config.partials_per_row
        count = forward_semaphore_count(rows, self.config.rows)
        logit = cute.make_tensor(workspace.iterator, cute.make_layout((rows,)))
        after_logit = workspace.iterator + rows
        sums_layout = cute.make_layout((rows, partials), stride=(partials, 1))
        sums = cute.make_tensor(after_logit, sums_layout)
        after_sums = cute.recast_ptr(after_logit + rows * partials, dtype=Int32)
        semaphores = cute.make_tensor(after_sums, cute.make_layout((count,)))
        self.target_logit(h, w, target, logit, semaphores, transform, ignored, stream)
        rows = logit, target, sums, None, semaphores, transform, None
        self.project_exp(h, w, *rows, Int32(0), vocab_splits, clusters, stream)
        self.reduce(sums, logit, target, stats, reduced, semaphores, ignored, mean, stream)
