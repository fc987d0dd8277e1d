"""`PortableProjection` with Triton's kernel of exponentials: no logits in memory.

It serves GPUs without kernels in CuTe, and what those do not take; the other steps are those of
plain torch, whose row-wise functions torch compiles.  This module imports Triton.
"""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.primitives import triton_kernels as kernels
from cutefce.ops.primitives.portable_projection import Logits, PartialSums, PortableProjection
from cutefce.ops.primitives.select_rows import with_aligned_rows
from cutefce.ops.primitives.triton_blocks import largest_of_rows, top_of_blocks
from cutefce.ops.rows.selection import CountedRows
from cutefce.ops.rows.targets import Targets, launch_transform


class TritonProjection(PortableProjection):
    """The same steps, with a window of exponentials in one launch."""

    def __init__(self, tiles: PortableTiles, counted: CountedRows | None) -> None:
        super().__init__(tiles)
        self.counted = counted

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return with_aligned_rows(h), w

    def _project_tiles(self, x: Logits, exps: Tensor | None, out: PartialSums | None) -> None:
        transform = launch_transform(x.targets, x.window) or (None, None, None)
        own = x.targets.index, exps, out, transform, self.counted
        kernels.project(x.h, x.w, x.window, x.reference, *own)

    @property
    def block(self) -> int:
        return kernels.BLOCK

    def _top_of_blocks(
        self, h: Tensor, w: Tensor, chosen: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        transform = launch_transform(targets, (0, len(w))) or (None, None, None)
        return top_of_blocks(h, w, chosen, targets.options.top_k, targets.index, transform)

    def largest(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return largest_of_rows(x, k)

    def repair_stored_exps(self, x: Logits, exps: Tensor, partial: Any) -> None:
        references = partial.references[:, x.window[0] // kernels.BLOCK :]
        kernels.rescale(exps, references, x.reference, self.counted)
