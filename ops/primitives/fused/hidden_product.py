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
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import FusedBackwardSpec, GradGemmSpec
from cutefce.cute_kernels.workspace import ExpsMemory
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.cute_gradients import grad_hidden_kernel, is_small, k_splits
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
        kernels: KernelSet,
        num_sms: int,
        layouts: Sequence[WindowLayout],
        backward: FusedBackwardSpec,
        short: int | None,
    ) -> "HiddenProduct | None":
        """Return the launch for a `FusedStep` with this `backward`.

        None if the product is not small, if the sums take more memory than the exponentials, or are
        not kept in float32, if cuBLAS adds them, or if some exponentials have no memory of their
        own.
        """
        sizes = problem.tokens, problem.hidden, problem.vocab
        windows = [window for layout in layouts for window in layout.windows]
        if len(windows) > 1 or windows[0].memory != ExpsMemory.KEPT or not is_small(*sizes):
            return None
        if backward.hidden_bits is not None or 4 * sizes[1] > problem.item_bytes * sizes[2]:
            return None
        kernel = grad_hidden_kernel(kernels, problem.vocab, True, short)
        if kernel is None:
            return None
        clusters = num_sms // kernel.config.cluster
        splits = k_splits(kernel, sizes[:2], problem.vocab, clusters)
        before, _, _ = backward.semaphore_places(problem.tokens, num_sms)
        first = backward.sums_size(*sizes[:2]) + before
        semaphores = slice(first, first + kernel.semaphore_count(clusters, problem.tokens))
        return cls(kernel, clusters, splits, sizes[:2], sizes[2], semaphores)

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
