"""dX's sums of a small step, which the forward forms.

A small step takes the CPU longer than the GPU.  What does not depend on the upstream gradient runs
while the CPU is on its way to the backward, and the backward is that much shorter.  It has the bits
of the product that other steps form in the backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import FusedBackwardSpec, GradGemmSpec
from cutefce.cute_kernels.workspace import BackwardWindow, ExpsMemory, GradHidden, Window
from cutefce.ops.primitives.cute_gradients import is_small
from cutefce.ops.rows.selection import PackedSelection


class HiddenProduct(NamedTuple):
    """The launch that forms dX's sums (N, D) of all kept columns in the backward's workspace."""

    kernel: GradGemmSpec
    clusters: int
    splits: int
    shape: tuple[int, int]
    """(N, D)"""
    vocab: int
    semaphores: slice
    """Their elements in the workspace: the backward's own for dX."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        num_sms: int,
        backward: FusedBackwardSpec,
        rows: Sequence[Sequence[int]],
    ) -> "HiddenProduct | None":
        """Return the launch that stands in for that of `backward` with a table of these rows.

        None if the product is not small, if the sums take more memory than the exponentials, or are
        not kept in float32, if cuBLAS adds them, or if some exponentials have no memory of their
        own.
        """
        row, shape = rows[0], (problem.tokens, problem.hidden)
        if len(rows) > 1 or row[Window.MEMORY] != ExpsMemory.KEPT or backward.hidden_bits:
            return None
        if 4 * problem.hidden > problem.item_bytes * problem.vocab:
            return None
        kind = row[BackwardWindow.GRAD_HIDDEN]
        if kind == GradHidden.GIVEN or not is_small(*shape, problem.vocab):
            return None
        kernel = backward.grad_hidden if kind == GradHidden.LONG else backward.grad_hidden_short
        clusters = num_sms // kernel.config.cluster
        before, _, _ = backward.semaphore_places(problem.tokens, num_sms)
        first = backward.sums_size(*shape) + before
        semaphores = slice(first, first + kernel.semaphore_count(clusters, problem.tokens))
        splits = row[BackwardWindow.K_SPLITS]
        return cls(kernel, clusters, splits, shape, problem.vocab, semaphores)

    def __call__(
        self, exps: Tensor, w: Tensor, workspace: Tensor, selected: PackedSelection | None
    ) -> None:
        """Form the sums of exponentials (N, K) and w (V, D), for the rows that count."""
        tokens, hidden = self.shape
        sums = workspace[: tokens * hidden].view(self.shape)
        semaphores = workspace[self.semaphores].view(torch.int32)
        semaphores.zero_()
        count = (semaphores, 0) if selected is None else (selected.parts()[-1], 1)
        operands = exps[:, : self.vocab], w.t(), sums, None, None, semaphores
        compiled(self.kernel)(*operands, *count, self.clusters, self.splits, 1)
