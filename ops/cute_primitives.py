"""The primitives on the CuTe DSL kernels; plain products stay torch's.

Sums are exact whatever the logits are, stored exponentials only while their row's sum does not lie
beyond the slack of its target.  `finish` notes the row blocks that do, and `settle` stores those
again, relative to their new reference; it is launched always, and ends at once where no block is
noted, so that nothing waits for the GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.cute_kernels.arch import Arch
from cutefce.cute_kernels.config import ProjectExpConfig
from cutefce.cute_kernels.jit_cache import compiled
from cutefce.cute_kernels.kernels import kernel_set
from cutefce.cute_kernels.problem import TileConfig
from cutefce.cute_kernels.tile_order import choose_windows
from cutefce.ops.primitives import Partial, Stats, TargetRows, Targets
from cutefce.ops.torch_primitives import TorchPrimitives


@dataclass(frozen=True)
class Parts:
    """What `project_exp` found."""

    sums: Tensor
    """(N, P) log2 of the parts' sums, relative to the target's logit."""
    notes: Tensor
    """(2 + row blocks,) int32; after `finish`, at 2 + i a 1 if block i must be stored again."""


class CutePrimitives(TorchPrimitives):
    """`cutefce.ops.primitives.Primitives` for one device, dtype and configuration."""

    def __init__(
        self,
        tiles: TileConfig,
        arch: Arch,
        dtype: str,
        project: ProjectExpConfig,
        multiprocessors: int,
    ) -> None:
        super().__init__(tiles)
        self.project = project
        self.clusters = multiprocessors // project.cluster
        self.kernels = kernel_set(arch, dtype, project)

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return h if has_aligned_rows(h) else h.clone(memory_format=torch.contiguous_format), w

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        logit = h.new_empty(h.shape[0], dtype=torch.float32)
        compiled(self.kernels.target_logit)(h, w, targets.index, logit, targets.ignore_index)
        return logit

    def project_exp(
        self, h: Tensor, w: Tensor, reference: Tensor, target: Tensor, exps: Tensor | None = None
    ) -> Partial:
        windows, notes = self._windows(h, w), self._notes(h)
        sums = reference.new_empty(h.shape[0], windows * self.project.parts_of_window)
        launch = compiled(self.kernels.sums if exps is None else self.kernels.sums_and_exps)
        launch(h, w, reference, target, sums, exps, notes, 0, windows, self.clusters)
        return Parts(sums, notes)

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
        launch, windows = compiled(self.kernels.exps), self._windows(h, w)
        notes = self._notes(h)
        launch(h, w, reference, target, None, exps, notes, first, windows, self.clusters)

    def finish(
        self, partial: Partial, target_logit: Tensor, targets: Targets, reduction: str
    ) -> tuple[Stats, Tensor]:
        stats = Stats(target_logit.new_empty(4, target_logit.shape[0]))
        reduced, mean = target_logit.new_empty(()), int(reduction == "mean")
        inputs, outputs = (partial.sums, target_logit, targets.index), (stats.rows, reduced.view(1))
        compiled(self.kernels.finish)(*inputs, *outputs, partial.notes, targets.ignore_index, mean)
        return stats, stats.loss if reduction == "none" else reduced

    def settle(
        self, exps: Tensor, h: Tensor, w: Tensor, target: Tensor, partial: Partial, stats: Stats
    ) -> None:
        w, notes, reference = w[: exps.shape[1]], partial.notes, stats.reference
        launch, windows = compiled(self.kernels.noted_exps), self._windows(h, w)
        launch(h, w, reference, target, None, exps, notes, 0, windows, self.clusters)

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, stats: Stats, scale: Tensor
    ) -> None:
        compiled(self.kernels.finish_dx)(out, sums, w, scale, -stats.sum, targets.address)

    def scale_rows(self, h: Tensor, scale: Tensor) -> Tensor:
        scaled = h.new_empty(h.shape)
        compiled(self.kernels.scale_rows)(scaled, h, None, scale, None, None)
        return scaled

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_rows: TargetRows,
        first: int,
        unit: Tensor | None,
    ) -> None:
        sums = scaled.new_empty(out.shape, dtype=torch.float32)
        self.multiply(sums, exps.t(), scaled, add=False)
        line = target_rows.line[first : first + out.shape[0]]
        units = None if unit is None else unit.repeat(out.shape[0])
        finish = self.kernels.finish_dw if unit is None else self.kernels.finish_dw_scaled
        compiled(finish)(out, sums, target_rows.sums, units, None, line)

    def _notes(self, h: Tensor) -> Tensor:
        blocks = -(-h.shape[0] // self.project.rows)
        make = torch.zeros if blocks > 1 else torch.empty  # see `cute_kernels.dsl`
        return make(2 + blocks, dtype=torch.int32, device=h.device)

    def _windows(self, h: Tensor, w: Tensor) -> int:
        return choose_windows(h.shape[0], w.shape[0], self.project, self.clusters)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether rows of x (N, D) are contiguous and begin at multiples of 16 bytes, as TMA needs."""
    pitch, unit = x.stride()
    return unit == 1 and pitch >= x.shape[1] and pitch % 8 == 0 and x.data_ptr() % 16 == 0
