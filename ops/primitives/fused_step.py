"""A plain training step on the kernels that keeps all exponentials, with few launch calls.

What depends on sizes alone is computed once, for all steps with the same metadata.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, most_vocab_splits
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.primitives.cute_gradients import grad_hidden_kernel, k_splits
from cutefce.ops.primitives.portable_gradients import matmul_into
from cutefce.ops.primitives.row_selection import row_count
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats


class FusedStep:
    """The launches of forwards and backwards with the same problem."""

    def __init__(
        self, problem: Problem, kernels: KernelSet, num_sms: int, columns: int, selects: bool
    ) -> None:
        """Compile or load what has `columns` (K) of memory for the exponentials of a token.

        `kernels` have those of dW.  The rows that count are computed alone if `selects`.
        """
        forward, backward = kernels.fused_storing_forward, kernels.fused_backward
        if selects:
            forward = kernels.fused_selecting_storing_forward
            backward = kernels.fused_selecting_backward
        assert forward is not None and backward is not None
        tokens, hidden, vocab = problem.tokens, problem.hidden, problem.vocab
        config, clusters = forward.config, num_sms // forward.config.cluster
        splits = most = choose_vocab_splits(tokens, vocab, config, clusters)
        if selects:
            most = max(splits, most_vocab_splits(tokens, vocab, config))
        self.arch = problem.arch if selects else None
        self.exps_shape, self.vocab = (tokens, columns), vocab
        self.forward_size = forward.workspace_size(tokens, hidden, most)
        self.backward_size = backward.workspace_size(tokens, vocab)
        self.forward_numbers = splits, most, clusters
        self.backward_clusters = num_sms // backward.config.cluster
        self.launch_forward, self.launch_backward = compiled(forward), compiled(backward)
        grad_hidden, self.launch_grad_hidden = grad_hidden_kernel(kernels, vocab), None
        if grad_hidden is not None:
            self.launch_grad_hidden = compiled(grad_hidden)
            clusters = num_sms // grad_hidden.config.cluster
            self.counters = grad_hidden.semaphore_count(clusters)
            splits = k_splits(grad_hidden, (tokens, hidden), vocab, clusters)
            self.grad_hidden_numbers = clusters, splits, 1

    def forward(
        self, h: Tensor, w: Tensor, y: Tensor, options: LossOptions
    ) -> tuple[Tensor, RowStats, Tensor, RowSelection | None]:
        """Return the loss, () or (N,), statistics, exponentials (N, K), and the selection.

        If there is one, all but a reduced loss are in its order.
        """
        exps, tokens = h.new_empty(self.exps_shape), h.shape[0]
        workspace = h.new_empty(self.forward_size, dtype=torch.float32)
        stats, loss = RowStats.empty(workspace, tokens), workspace.new_empty(())
        selection = order = None
        if self.arch is not None:
            order = torch.empty_like(y), torch.empty_like(y), y.new_empty(1, dtype=torch.int32)
            selection = RowSelection(*order, tokens, tokens, self.arch)
        results = stats.rows, loss, exps, order
        numbers = options.ignore_index, *self.forward_numbers, int(options.reduction == "mean")
        self.launch_forward(h, w, y, workspace, *results, None, *numbers)
        return loss if options.is_scalar else stats.loss, stats, exps, selection

    def backward(
        self,
        upstream: Tensor,
        h: Tensor,
        w: Tensor,
        y: Tensor,
        stats: Tensor,
        exps: Tensor,
        selection: RowSelection | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        """Return dX (N, D) and dW (V, D) for the upstream gradient of the loss, () or (N,).

        That is in the order of the selection, as are the results of the forward.  More than eight
        parameters: inputs, and results of the forward.
        """
        order, sums = None, h.new_empty(h.shape, dtype=torch.float32)
        if selection is not None:
            order = selection.order, selection.targets, selection.counts
        kept = exps if exps.shape[1] == self.vocab else exps[:, : self.vocab]
        self._sum_grad_hidden(sums, kept, w, selection)
        dx, dw = h.new_empty(h.shape), w.new_empty(w.shape)
        workspace = sums.new_empty(self.backward_size)
        upstream = upstream.to(sums.dtype).reshape(-1).contiguous()
        operands = h, w, y, order, stats, upstream, kept, sums, dx, dw, workspace
        numbers = options.ignore_index, int(options.reduction == "mean"), self.backward_clusters
        self.launch_backward(*operands, *numbers)
        return dx, dw

    def _sum_grad_hidden(
        self, sums: Tensor, exps: Tensor, w: Tensor, selection: RowSelection | None
    ) -> None:
        """Write exps (N, V) @ w (V, D) to `sums` (N, D)."""
        if self.launch_grad_hidden is None:
            matmul_into(sums, exps, w, accumulate=False)
            return
        semaphores = torch.zeros(self.counters, dtype=torch.int32, device=sums.device)
        rows = row_count(selection, semaphores)
        operands = exps, w.t(), sums, None, None, semaphores
        self.launch_grad_hidden(*operands, *rows, *self.grad_hidden_numbers)


@process_cache
def load(kernels: KernelSet, num_sms: int, selects: bool, device: torch.device) -> None:
    """Run a small step: the first launch of a library loads it, which a graph capture may refuse.

    Its sizes are those of a problem that verification covers.
    """
    tokens, hidden, vocab, columns = 1, 64, 1000, 1024
    problem = Problem(tokens, hidden, vocab, "bfloat16", device.type, arch=kernels.row_sums.arch)
    step, options = FusedStep(problem, kernels, num_sms, columns, selects), LossOptions()
    h = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=device)
    w, y = h.new_zeros(vocab, hidden), torch.zeros(tokens, dtype=torch.int64, device=device)
    _, stats, exps, selection = step.forward(h, w, y, options)
    upstream = stats.rows.new_ones(())
    step.backward(upstream, h, w, y, stats.rows, exps, selection, options)
