"""`PortableProjection` with Triton's kernel of exponentials: no logits in memory.

It serves GPUs without kernels in CuTe, and what those do not take; the other steps are those of
plain torch, whose row-wise functions torch compiles.  This module imports Triton.
"""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives import triton_kernels as kernels
from cutefce.ops.primitives.portable_projection import PartialSums, PortableProjection
from cutefce.ops.primitives.select_rows import with_aligned_rows
from cutefce.ops.primitives.triton_blocks import logits_of_blocks
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.selection import CountedRows
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets, launch_transform


class TritonProjection(PortableProjection):
    """The same steps, with a window of exponentials in one launch."""

    def __init__(self, tiles: PortableTiles, counted: CountedRows | None) -> None:
        super().__init__(tiles)
        self.counted = counted

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return with_aligned_rows(h), w

    def _project_tiles(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor | None,
        out: PartialSums | None,
    ) -> None:
        transform = launch_transform(targets, window) or (None, None, None)
        own = targets.index, exps, out, transform, self.counted
        kernels.project(h, w, window, reference, *own)

    @property
    def block(self) -> int:
        return kernels.BLOCK

    def _logits_of_blocks(
        self, h: Tensor, w: Tensor, chosen: Tensor, logits: LogitMap | None
    ) -> Tensor:
        transform = (None, None, None) if logits is None else logits.columns(0, len(w))
        return logits_of_blocks(h, w, chosen, transform)

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        targets: Targets,
        partial: Any,
        stats: RowStats,
    ) -> None:
        start = first // kernels.BLOCK
        references = partial.references[:, start:]
        kernels.rescale(exps, references, stats.reference, self.counted)
