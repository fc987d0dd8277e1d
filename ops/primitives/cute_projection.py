"""`PortableProjection` on the CuTe DSL kernels: what their launches are given.

Row sums are exact for any logits; stored exponentials only while a row's largest logit is within
`SLACK` of its target's.  `reduce_partials` flags the row blocks where it is not, and
`repair_stored_exps` stores those again, relative to their new reference.  The repair is always
launched and exits at once where no block is flagged, so that nothing synchronizes the GPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.schedule.order import choose_vocab_splits, most_vocab_splits
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.spec.rowwise import MoveRowsSpec
from cutefce.cute_kernels.workspace import NUM_STATS, Move, Semaphore, forward_semaphore_count
from cutefce.ops.outputs.steps import CuteOutputSteps
from cutefce.ops.primitives.block_sizes import UNUSED_COLUMNS
from cutefce.ops.primitives.portable_projection import Logits, PortableProjection
from cutefce.ops.primitives.select_rows import (
    as_bits,
    gather_rows,
    row_count,
    row_order,
    row_range,
    with_aligned_rows,
)
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats, reduce_losses
from cutefce.ops.rows.targets import Targets, launch_transform
from cutefce.ops.soft_targets.kernels import CuteSoftTargetSteps


class Semaphores:
    """Zeroed int32 counters for the launches of one call on one stream, filled in blocks."""

    BLOCK = 1 << 14
    """Counters that are zeroed at a time.

    Each fill is a launch, but for those of `target_logit` and `row_coefficients`."""
    ALIGNMENT = 32
    """Counters of two launches share no 128-byte line."""
    EMPTY = torch.empty(0, dtype=torch.int32)

    def __init__(self) -> None:
        self._zeros = self.EMPTY
        self._size = self._taken = 0

    def adopt(self, like: Tensor, size: int = BLOCK) -> Tensor:
        """Return a block for a launch to set to 0, of which the next counters are taken."""
        zeros = like.new_empty(size, dtype=torch.int32)  # faster than torch.empty
        self._zeros, self._size, self._taken = zeros, size, 0
        return zeros

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return `count` or more counters that are 0 and belong to one launch."""
        begin = self._taken
        if self._size < begin + count:
            begin, self._size = 0, max(count, self.BLOCK)
            self._zeros = torch.zeros(self._size, dtype=torch.int32, device=device)
        self._taken = begin + ceil_div(count, self.ALIGNMENT) * self.ALIGNMENT
        return self._zeros[begin:] if begin else self._zeros


@dataclass(frozen=True)
class PartialLse:
    """Row sums of one `project_exp`."""

    sums: Tensor
    """(N, P) log2 of partial sums, relative to the target's logit."""
    semaphores: Tensor
    """(`forward_semaphore_count`,) int32, whose repair flags `reduce_partials` sets."""
    reductions: Tensor | None = None
    """(K, N, P) those of `common.row_reductions`, if asked for."""


class CuteProjection(CuteSoftTargetSteps, CuteOutputSteps, PortableProjection):
    """The same steps on the kernels of one device, dtype and configuration."""

    kernels: KernelSet
    num_sms: int
    semaphores: Semaphores
    clears: bool
    """Whether zeros are written to stored rows that do not count: other GEMMs read them."""

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return with_aligned_rows(h), w

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        kernel = self.kernels.target_logit
        tokens, class_row = targets.index.shape[0], None
        logit = h.new_empty(tokens, dtype=torch.float32)
        zeros = self.semaphores.adopt(h, min(Semaphores.BLOCK, kernel.max_zeros(tokens)))
        transform = launch_transform(targets, (0, w.shape[0]))
        order, is_selected = row_order(targets.order, targets.index)
        numbers = targets.options.ignore_index, is_selected
        if targets.class_row is not None:
            kernel = replace(kernel, class_row=True)
            class_row = targets.class_row.row, torch.empty_like(logit)
        compiled(kernel)(h, w, targets.index, logit, zeros, transform, order, *numbers, class_row)
        if class_row is not None:
            targets.set_class_logits(class_row[1])
        return logit

    def select(self, h: Tensor, selection: RowSelection, scale: Tensor | None, out: Tensor) -> None:
        gather_rows(self.kernels, h, selection, scale, out)

    def project_exp(self, x: Logits, exps: Tensor | None = None) -> PartialLse:
        partial = self.launch_sums(self.sums_kernel(x.targets.options), x, exps)
        self._clear(exps, x.targets)
        return partial

    def launch_sums(
        self,
        kernel: ProjectExpSpec,
        x: Logits,
        exps: Tensor | None = None,
        samples: tuple[Any, ...] | None = None,
    ) -> PartialLse:
        """Do what `project_exp` does with a kernel of row sums, and its argument `samples`."""
        h, w, (first, last), reference, targets = x
        transform = launch_transform(targets, x.window)
        tokens, columns = h.shape[0], last - first
        config, clusters = kernel.config, self._clusters(kernel)
        w = row_range(w, first, last)
        semaphores, selection = self._take_semaphores(h), targets.selection
        splits = most = self.splits_of_blocks(kernel, columns, targets.options)
        if splits:  # of all tokens: the device would choose fewer splits for those that count
            selection = None
        else:
            splits = most = choose_vocab_splits(tokens, columns, config, clusters)
        if selection is not None:  # a window's share of what is affordable for all
            affordable = most_vocab_splits(tokens, targets.vocab, config)
            most = max(splits, affordable * columns // targets.vocab)
        sums, more = reference.new_empty(tokens, most * config.partials_per_row), None
        if kernel.reductions.planes:
            more = reference.new_empty(kernel.reductions.planes, *sums.shape)
        index = targets.index
        if kernel.reductions.of_all:
            # a class behind the window may be in its last tile, where the kernel would leave it out
            index = torch.where(index < last, index, -1)
        if exps is None and kernel.store:
            exps = h.new_empty(tokens, UNUSED_COLUMNS)
        rows = reference, index, sums, exps, semaphores, transform
        count = row_count(selection, semaphores)
        compiled(kernel)(h, w, *rows, more, samples, *count, first, splits, clusters)
        return PartialLse(sums, semaphores, more)

    def concat_partials(self, partials: Sequence[PartialLse]) -> PartialLse:
        if len(partials) == 1:
            return partials[0]
        sums = torch.cat([partial.sums for partial in partials], 1)
        more = [partial.reductions for partial in partials if partial.reductions is not None]
        return PartialLse(sums, partials[0].semaphores, torch.cat(more, 2) if more else None)

    def gather_partials(
        self, partial: PartialLse, gather: Callable[[Tensor], Tensor]
    ) -> PartialLse:
        total = torch.logsumexp(partial.sums * math.log(2), 1) / math.log(2)
        return PartialLse(gather(total).t().contiguous(), partial.semaphores)

    def recompute_exp(self, x: Logits, exps: Tensor) -> None:
        kernel = self.kernels.exps
        # one split a tile: there are no sums to keep in registers across tiles
        splits = ceil_div(x.window[1] - x.window[0], kernel.config.tile_n)
        self._store_exps(kernel, x, exps, self._take_semaphores(x.h), splits)
        self._clear(exps, x.targets)

    def reduce_partials(
        self, partial: PartialLse, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        stats = RowStats(target_logit.new_empty(NUM_STATS, target_logit.shape[0]))
        reduced = target_logit.new_empty(())
        tensors = partial.sums, target_logit, targets.index, stats.rows, reduced, partial.semaphores
        numbers = targets.options.ignore_index, int(targets.divides_by_count)
        compiled(self.kernels.reduce_partials)(*tensors, *numbers)
        return stats, reduce_losses(stats, targets, None if targets.terms else reduced)

    def repair_stored_exps(self, x: Logits, exps: Tensor, partial: PartialLse) -> None:
        kernel, columns = self.kernels.repair_exps, x.window[1] - x.window[0]
        clusters = self._clusters(kernel)
        splits = choose_vocab_splits(x.h.shape[0], columns, kernel.config, clusters)
        self._store_exps(kernel, x, exps, partial.semaphores, splits)

    def _store_exps(
        self, kernel: ProjectExpSpec, x: Logits, exps: Tensor, semaphores: Tensor, splits: int
    ) -> None:
        """Launch a kernel that stores exponentials, and sums none."""
        rows = x.reference, x.targets.index, None, exps, semaphores
        transform = launch_transform(x.targets, x.window), None, None
        numbers = *row_count(x.targets.selection, semaphores), x.window[0], splits
        w, clusters = row_range(x.w, *x.window), self._clusters(kernel)
        compiled(kernel)(x.h, w, *rows, *transform, *numbers, clusters)

    def far_rows(self, partial: PartialLse, targets: Targets) -> RowSelection | None:
        if targets.selection is None or self.kernels.grad_hidden_again is None:
            return None
        # all rows if `reduce_partials` has flagged any of them
        counts = partial.semaphores[Semaphore.REPAIR_ROWS : Semaphore.REPAIR_ROWS + 1]
        return replace(targets.selection, counts=counts, may_skip=True, must_skip=True)

    def _clear(self, exps: Tensor | None, targets: Targets) -> None:
        """Write zeros to the rows of `exps` (N, K) that do not count, if other GEMMs read them."""
        if self.clears and exps is not None and targets.selection is not None:
            bits, order = as_bits(exps), targets.selection.order
            count = targets.selection.count
            spec = MoveRowsSpec(self.kernels.arch)
            compiled(spec)(bits, bits, order, None, count, Move.CLEAR)

    def _take_semaphores(self, h: Tensor) -> Tensor:
        count: int = forward_semaphore_count(h.shape[0], self.kernels.reduce_partials.rows)
        return self.semaphores.take(count, h.device)

    def _clusters(self, kernel: ProjectExpSpec) -> int:
        return self.num_sms // kernel.config.cluster
