"""A plain training step on the kernels of windows whose exponentials are stored, in two host calls.

What depends on sizes alone is computed once, for all steps with the same metadata.  Where rows are
selected, the memory of a step may have several layouts, see `planning.window_layout`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import FusedBackwardSpec, FusedForwardSpec
from cutefce.cute_kernels.workspace import NUM_STATS, Stat
from cutefce.ops import torch_compat
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.planning.window_layout import WindowLayout
from cutefce.ops.primitives.fused import tables
from cutefce.ops.primitives.fused.hidden_product import HiddenProduct
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.rows.selection import PackedSelection

MAX_WORKSPACE = 1 << 31
"""Elements of 4 bytes that an int32 can count."""
MAX_WINDOWS = 256
"""Windows of a step: each takes a few KiB of the stack of its host function."""


class ForBackward(NamedTuple):
    """What a forward leaves for the backward."""

    stats: Tensor
    """(NUM_STATS, N) the statistics."""
    exps: Tensor
    """(N, K) exponentials of kept columns."""
    dw: Tensor | None
    """(V, D) memory of dW, which holds others; None if it holds none."""
    selected: PackedSelection | None
    """Which tokens were computed, and come first; None for all."""
    workspace: Tensor | None
    """Memory for that of the backward, with dX's sums; None if the backward has to form them."""


class FusedStep:
    """The launches of forwards and backwards with the same problem."""

    def __init__(
        self,
        problem: Problem,
        kernels: KernelSet,
        num_sms: int,
        layouts: Sequence[WindowLayout],
        selects: bool,
        hidden_bits: int | None,
        short: int | None = None,
    ) -> None:
        """Compile or load what runs the windows of the `layouts`, the first of which is for N rows.

        `kernels` have those of dW.  The rows that count are computed alone if `selects`.  dX's sums
        are kept in 16 bits and `hidden_bits`, or float32.  `short` is that of `grad_hidden_kernel`.
        """
        forward, backward = fused_kernels(kernels, selects, hidden_bits)
        sizes, whole = (problem.tokens, problem.hidden, problem.vocab), layouts[0]
        self.arch = problem.arch if selects else None
        self.kept, self.aliases = (sizes[0], whole.kept), whole.aliased > 0
        self.has_layouts = len(layouts) > 1
        clusters = num_sms // forward.config.cluster
        of_layouts = [tables.forward_rows(problem, forward, clusters, x, selects) for x in layouts]
        most = tables.equalize_splits(of_layouts)
        self._forward_table = tables.Table([row for rows in of_layouts for row in rows])
        stored = [(x, window) for x in layouts for window in x.stored]
        windows = stored + [(x, w) for x in layouts for w in x.windows if w.recomputed]
        self.forward_size = forward.workspace_size(*sizes[:2], most, len(stored))
        self.forward_numbers = most, most, clusters
        of_dx = self.has_layouts, hidden_bits, short
        rows = [
            tables.backward_row(problem, kernels, num_sms, window, selects, *of_dx)
            for window in windows
        ]
        self._backward_numbers, self._backward_sizes = [], []
        for uniform in (False, True):
            probabilities = len(stored if uniform else windows)
            gathers = len(stored) < len(windows) and not uniform
            self._backward_numbers.append((probabilities, whole.buffer, int(gathers)))
            more = len(rows), num_sms, whole.buffer, gathers
            self._backward_sizes.append(backward.workspace_size(sizes, *more))
        self._calls_cublas = tables.is_given(rows[0])
        self._product = HiddenProduct.of(problem, num_sms, backward, rows)
        if self._product is not None:
            rows = [tables.given(rows[0])]
        self._backward_table, self._num_sms = tables.Table(rows), num_sms
        self._run_forward, self._run_backward = compiled(forward), compiled(backward)

    def forward(
        self, h: Tensor, w: Tensor, y: Tensor, options: LossOptions
    ) -> tuple[Tensor, ForBackward]:
        """Return the loss, () or (N,), and what the backward needs of it.

        h (N, D) and w (V, D) have aligned rows; targets y (N,) are int64, and contiguous.  If there
        is a selection, all but a reduced loss are in its order.
        """
        exps, dw = h.new_empty(self.kept), w.new_empty(w.shape) if self.aliases else None
        # a capture of the forward alone would not own what the backward writes
        product = self._product if torch_compat.capture_id() is None else None
        size = self.forward_size
        if product is not None:
            size = max(size, self._backward_sizes[0])
        workspace = h.new_empty(size, dtype=torch.float32)
        stats, loss = workspace.new_empty(NUM_STATS, h.shape[0]), workspace.new_empty(())
        selected = None if self.arch is None else PackedSelection.empty(y, self.arch)
        saved = ForBackward(stats, exps, dw, selected, None if product is None else workspace)
        numbers = options.ignore_index, *self.forward_numbers, int(options.reduction == "mean")

        memories = exps if dw is None else dw, exps if self.kept[1] else dw
        results = stats, loss, (*memories, *self._forward_table.arguments)
        order = None if selected is None else selected.parts()
        own = workspace[: self.forward_size]
        self._run_forward(h, w, y, own, *results, order, None, *numbers)
        if product is not None:
            product(exps, w, workspace, selected)
        return loss if options.is_scalar else stats[Stat.LOSS], saved

    def backward(
        self,
        upstream: Tensor,
        h: Tensor,
        w: Tensor,
        y: Tensor,
        saved: ForBackward,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return dX (N, D) and dW (V, D) for the upstream gradient of the loss, () or (N,).

        That is in the order of the selection.  The memory of dW in `saved`, and the workspace, are
        overwritten.
        """
        stats, exps, dw, selected, workspace = saved
        uniform, product = upstream.ndim == 0, self._product if workspace is None else None
        size = self._backward_sizes[uniform]
        if workspace is None:
            workspace = stats.new_empty(size)
        if self._calls_cublas:
            sums = workspace[: h.numel()].view(h.shape)
            kept = exps if exps.shape[1] == w.shape[0] else exps[:, : w.shape[0]]
            matmul_into(sums, kept, w, accumulate=False)
        dx = h.new_empty(h.shape)
        dw = w.new_empty(w.shape) if dw is None else dw
        if upstream.dtype != stats.dtype:  # converting to the same one takes CPU time
            upstream = upstream.to(stats.dtype)
        upstream = upstream.contiguous()
        of_options = options.ignore_index, int(options.reduction == "mean")
        if product is not None:
            product(exps, w, workspace, selected)
        stored = exps if self.kept[1] else dw
        order = None if selected is None else selected.parts()
        operands = h, w, y, order, stats, upstream.reshape(-1), stored
        numbers = *self._backward_table.arguments, *self._backward_numbers[uniform]
        results = dx, dw, workspace[:size]
        self._run_backward(*operands, *results, *numbers, *of_options, self._num_sms)
        return dx, dw


def fused_kernels(
    kernels: KernelSet, selects: bool, hidden_bits: int | None
) -> tuple[FusedForwardSpec, FusedBackwardSpec]:
    """Return the kernels of a fused step, which `kernels` have with those of dW."""
    forward = kernels.fused_storing_forward
    if selects:
        forward = kernels.fused_selecting_storing_forward
    backward = kernels.fused_backward_of(selects, hidden_bits)
    assert forward is not None and backward is not None
    return forward, backward


def can_fuse(
    problem: Problem,
    kernels: KernelSet,
    num_sms: int,
    layouts: Sequence[WindowLayout],
    selects: bool,
    hidden_bits: int | None,
) -> bool:
    """Whether one host function can run the windows of the `layouts`.

    A launch clears their semaphores, and int32 count the elements of the workspace.
    """
    windows = sum(len(layout.windows) for layout in layouts)
    if windows > MAX_WINDOWS:
        return False
    forward, backward = fused_kernels(kernels, selects, hidden_bits)
    sizes = problem.tokens, problem.hidden, problem.vocab
    zeros = forward.zeros(problem.tokens, sum(len(layout.stored) for layout in layouts))
    recomputes = any(layout.recomputes for layout in layouts)
    more = windows, num_sms, layouts[0].buffer, recomputes
    fits = backward.workspace_size(sizes, *more) < MAX_WORKSPACE
    return fits and zeros <= kernels.target_logit.max_zeros(problem.tokens)
