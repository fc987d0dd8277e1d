"""The primitives on the CuTe DSL kernels.

Sums are exact whatever the logits are, stored exponentials only while their row's sum does not lie
beyond the slack of its target.  `finish` notes the row blocks that do, and `settle` stores those
again, relative to their new reference; it is launched always, and ends at once where no block is
noted, so that nothing waits for the GPU.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutefce.cute_kernels.arch.base import TILE_K, Arch
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.schedule.order import choose_k_splits, choose_vocab_splits
from cutefce.cute_kernels.spec import GradGemmSpec, kernel_set
from cutefce.cute_kernels.workspace import forward_semaphore_count
from cutefce.ops.primitives.interface import Partial, TargetPart
from cutefce.ops.primitives.portable import TorchPrimitives
from cutefce.ops.primitives.rows import Stats, Targets

NO_ZEROS = torch.empty(0, dtype=torch.int32)


@dataclass(frozen=True)
class Parts:
    """What `project_exp` found."""

    sums: Tensor
    """(N, P) log2 of the parts' sums, relative to the target's logit."""
    notes: Tensor
    """(2 + row blocks,) int32; after `finish`, at 2 + i a 1 if block i must be stored again."""


@dataclass(frozen=True)
class TargetLists:
    """The tokens of each target, in order, and what each contributes to dW."""

    order: Tensor
    """(N,) int64: tokens by target."""
    starts: Tensor
    """(V + 1,) int32: where in `order` each target's begin."""
    coefficient: Tensor
    """(N,): in that order."""
    h: Tensor
    """(N, D)"""


class CutePrimitives(TorchPrimitives):
    """`cutefce.ops.primitives.interface.Primitives` for one device, dtype and set of configurations."""

    ZEROS: ClassVar[int] = 1 << 14
    """Zeros that a call fills at a time: each filling is a launch, the first `target_logit`'s."""

    def __init__(
        self,
        tiles: PortableTiles,
        arch: Arch,
        dtype: str,
        configs: KernelConfigs,
        num_sms: int,
    ) -> None:
        super().__init__(tiles)
        self.project = configs.project_exp
        self.num_sms = num_sms
        self.clusters = num_sms // self.project.cluster
        self.kernels = kernel_set(arch, dtype, configs)
        self._zeros: Tensor | None = None
        self._filled = self._taken = 0

    def for_a_call(self) -> "CutePrimitives":
        """Return the same for one call on one stream, whose launches share what it fills."""
        own = object.__new__(CutePrimitives)  # a quarter of what copy.copy takes
        own.__dict__.update(self.__dict__, _zeros=NO_ZEROS, _filled=0, _taken=0)
        return own

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return h if has_aligned_rows(h) else h.clone(memory_format=torch.contiguous_format), w

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        logit, kernel = h.new_empty(h.shape[0], dtype=torch.float32), self.kernels.target_logit
        count = min(self.ZEROS, kernel.max_zeros(h.shape[0]))
        zeros = h.new_empty(count, dtype=torch.int32)  # half of what torch.empty takes
        compiled(kernel)(h, w, targets.index, logit, zeros, targets.ignore_index)
        if self._zeros is not None:
            self._zeros, self._filled, self._taken = zeros, count, 0
        return logit

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> Partial:
        first, last = window
        w = w if last - first == w.shape[0] else w[first:last]  # slicing takes 2 us of a call
        windows, notes = self._windows(h, w), self._notes(h)
        sums = reference.new_empty(h.shape[0], windows * self.project.partials_per_row)
        launch = compiled(self.kernels.row_sums if exps is None else self.kernels.row_sums_and_exps)
        launch(h, w, reference, target, sums, exps, notes, first, windows, self.clusters)
        return Parts(sums, notes)

    def forward(
        self, h: Tensor, w: Tensor, targets: Targets, reduction: str
    ) -> tuple[Stats, Tensor]:
        kernel, windows, tokens = self.kernels.fused_forward, self._windows(h, w), h.shape[0]
        between = h.new_empty(kernel.workspace_size(tokens, windows), dtype=torch.float32)
        stats, reduced = Stats(between.new_empty(4, tokens)), between.new_empty(())
        tensors = h, w, targets.index, between, stats.rows, reduced
        mean = _divides(targets, reduction)
        compiled(kernel)(*tensors, targets.ignore_index, windows, self.clusters, mean)
        return stats, _reduced(stats, reduced, targets, reduction)

    def side_by_side(self, partials: Sequence[Partial]) -> Partial:
        if len(partials) == 1:
            return partials[0]
        return Parts(torch.cat([part.sums for part in partials], 1), partials[0].notes)

    def join(self, partial: Partial, gather: Callable[[Tensor], Tensor]) -> Partial:
        total = torch.logsumexp(partial.sums * math.log(2), 1) / math.log(2)
        return Parts(gather(total).t().contiguous(), partial.notes)

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor,
    ) -> None:
        first, last = window
        w = w[first:last]
        # each tile by itself: there is nothing to sum over several of them
        launch, windows = compiled(self.kernels.exps), -(-w.shape[0] // self.project.tile_n)
        notes = self._notes(h)
        launch(h, w, reference, target, None, exps, notes, first, windows, self.clusters)

    def finish(
        self, partial: Partial, target_logit: Tensor, targets: Targets, reduction: str
    ) -> tuple[Stats, Tensor]:
        stats = Stats(target_logit.new_empty(4, target_logit.shape[0]))
        reduced = target_logit.new_empty(())
        inputs, outputs = (partial.sums, target_logit, targets.index), (stats.rows, reduced)
        numbers = targets.ignore_index, _divides(targets, reduction)
        compiled(self.kernels.reduce_partials)(*inputs, *outputs, partial.notes, *numbers)
        return stats, _reduced(stats, reduced, targets, reduction)

    def settle(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        target: Tensor,
        partial: Partial,
        stats: Stats,
    ) -> None:
        w, notes, reference = w[first : first + exps.shape[1]], partial.notes, stats.reference
        launch, windows = compiled(self.kernels.repair_exps), self._windows(h, w)
        launch(h, w, reference, target, None, exps, notes, first, windows, self.clusters)

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, scale: Tensor, weight: Tensor
    ) -> None:
        rounded = out.dtype == w.dtype
        finish = self.kernels.finish_dx if rounded else self.kernels.finish_dx_fp32
        compiled(finish)(out, sums, w, scale.contiguous(), weight, targets.address)

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        narrow = x.dtype == out.dtype
        launch = compiled(self.kernels.scale_rows if narrow else self.kernels.scale_fp32_rows)
        launch(out, x, None, scale.contiguous(), None, None)

    def add_grad_hidden(self, sums: Tensor, exps: Tensor, w: Tensor, *, fresh: bool) -> None:
        short = exps.shape[1] < KernelConfigs.SHORT
        kernel = self.kernels.grad_hidden_short if short else self.kernels.grad_hidden
        if kernel is None:
            super().add_grad_hidden(sums, exps, w, fresh=fresh)
        else:
            self._launch(kernel, exps, w.t(), sums, None, fresh)

    def add_grad_weight(self, sums: Tensor, exps: Tensor, scaled: Tensor, *, fresh: bool) -> None:
        if self.kernels.grad_weight_accumulate is None:
            super().add_grad_weight(sums, exps, scaled, fresh=fresh)
        else:
            self._launch(
                self.kernels.grad_weight_accumulate, exps.t(), scaled.t(), sums, None, fresh
            )

    def target_part(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetPart:
        if self.kernels.grad_weight is None:
            return super().target_part(h, coefficient, targets)
        # who has no target here comes last, in the list of none
        here = targets.active & (targets.address == targets.index)
        target, order = torch.where(here, targets.index, targets.vocab).sort(stable=True)
        entries = torch.arange(targets.vocab + 1, device=h.device)
        starts = torch.searchsorted(target, entries, out_int32=True)
        return TargetLists(order, starts, coefficient[order], h)

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        part: TargetPart,
        first: int,
        unit: Tensor,
    ) -> None:
        if self.kernels.grad_weight is None:
            super().finish_dw(out, exps, scaled, part, first, unit)
        else:
            lists = part.order, _starts(part, first, out), part.coefficient, part.h, unit.view(1)
            self._launch(self.kernels.grad_weight, exps.t(), scaled.t(), out, lists)

    def add_target_part(self, sums: Tensor, part: TargetPart, first: int) -> None:
        if self.kernels.add_targets is None:
            super().add_target_part(sums, part, first)
        else:
            lists = part.order, _starts(part, first, sums), part.coefficient, part.h
            compiled(self.kernels.add_targets)(sums, *lists)

    def _launch(
        self,
        kernel: GradGemmSpec,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        lists: Any,
        fresh: bool = True,
    ) -> None:
        config, (rows, columns) = kernel.config, out.shape
        clusters, steps = self.num_sms // config.cluster, -(-a.shape[1] // TILE_K)
        units = -(-rows // config.rows) * -(-columns // config.tile_n)
        of_sums = (
            (None,) * 2 if kernel.final else (choose_k_splits(units, clusters, steps), int(fresh))
        )
        notes = self._take_zeros(kernel.semaphore_count(clusters), out.device)
        compiled(kernel)(a, b, out, lists, notes, clusters, *of_sums)

    def _notes(self, h: Tensor) -> Tensor:
        return self._take_zeros(forward_semaphore_count(h.shape[0], self.project.rows), h.device)

    def _take_zeros(self, count: int, device: torch.device) -> Tensor:
        """Return int32 zeros that nobody else has, `count` of them or more."""
        if self._zeros is None:
            return torch.zeros(count, dtype=torch.int32, device=device)
        begin = self._taken
        if self._filled < begin + count:
            begin, self._filled = 0, max(count, self.ZEROS)
            self._zeros = torch.zeros(self._filled, dtype=torch.int32, device=device)
        self._taken = begin + -(-count // 32) * 32
        return self._zeros[begin:] if begin else self._zeros  # slicing takes 3 us of a call

    def _windows(self, h: Tensor, w: Tensor) -> int:
        return choose_vocab_splits(h.shape[0], w.shape[0], self.project, self.clusters)


def _divides(targets: Targets, reduction: str) -> int:
    """Return whether a kernel that reduces the losses is to divide by the targets that count."""
    return int(reduction == "mean" and targets.denominator is None)


def _reduced(stats: Stats, reduced: Tensor, targets: Targets, reduction: str) -> Tensor:
    """Return the loss, of what a kernel `reduced`."""
    if reduction == "none":
        return stats.loss
    if targets.denominator is None:
        return reduced
    return reduced * targets.weight(reduction, reduced.dtype)


def _starts(part: TargetLists, first: int, out: Tensor) -> Tensor:
    """Return where the lists of the targets begin that are rows of `out`, from `first` on."""
    return part.starts[first : first + len(out) + 1]


def has_aligned_rows(x: Tensor) -> bool:
    """Whether rows of x (N, D) are contiguous and begin at multiples of 16 bytes, as TMA needs."""
    pitch, unit = x.stride()
    return unit == 1 and pitch >= x.shape[1] and pitch % 8 == 0 and x.data_ptr() % 16 == 0
