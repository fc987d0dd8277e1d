"""`Primitives` on Triton's kernels: no logits in memory, and dW and rows in one launch each.

They serve GPUs without kernels in CuTe, and what those do not take.  cuBLAS forms the products of
dX; the other steps are those of plain torch, whose row-wise functions torch compiles.  This module
imports Triton.
"""

from typing import Any

from torch import Tensor

from cutefce.ops.outputs import triton_blocks
from cutefce.ops.primitives import triton_kernels as kernels
from cutefce.ops.primitives import triton_rows
from cutefce.ops.primitives.portable_gradients import TargetGrad
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.primitives.select_rows import with_aligned_rows
from cutefce.ops.primitives.triton_weight import Listed, weight_product
from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.partial_sums import PartialSums
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets, launch_transform


class TritonPrimitives(Primitives):
    """The same steps, with a window of exponentials or of dW in one launch."""

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return with_aligned_rows(h), w

    def _project_tiles(self, x: Logits, exps: Tensor | None, out: PartialSums | None) -> None:
        transform = launch_transform(x.targets, x.window) or (None, None, None)
        own = x.targets.index, exps, out, transform, self.counted
        kernels.project(x.h, x.w, x.window, x.reference, *own)

    @property
    def _block(self) -> int:
        return kernels.BLOCK

    def _block_kernels(self, x: Tensor) -> Any:
        return triton_blocks

    def repair_stored_exps(self, x: Logits, exps: Tensor, partial: Any) -> None:
        references = partial.references[:, x.window[0] // kernels.BLOCK :]
        kernels.rescale(exps, references, x.reference, self.counted)

    def combine(self, out: Sums, x: Tensor | None = None, **given: Any) -> None:
        triton_rows.combine(out, x, **given)

    def target_grad(self, h: Tensor, coefficient: Tensor | None, targets: Targets) -> TargetGrad:
        if coefficient is None:
            return None
        return Listed.of(h, targets.safe_index, coefficient, targets.vocab)

    def add_weight(
        self,
        out: Sums,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGrad,
        first: int,
        *,
        grad_scale: Tensor | None = None,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        accumulate: bool = False,
    ) -> None:
        """More than eight parameters: see the class of plain torch."""
        more: Any = {"last": grad_scale, "rank_one": rank_one, "counted": self.counted}
        weight_product(out, exps, scaled, first, target_grad, accumulate=accumulate, **more)
