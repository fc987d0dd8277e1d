"""The steps of soft targets on the CuTe DSL kernels: what their launches are given."""

from torch import Tensor

from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.spec.rowwise import PutSoftSpec, SoftLogitsSpec
from cutefce.ops.primitives.select_rows import row_order
from cutefce.ops.primitives.weighted_sum import SoftTargetSteps
from cutefce.ops.rows.targets import Targets


class CuteSoftTargetSteps(SoftTargetSteps):
    """The same steps on the kernels."""

    kernels: KernelSet

    def soft_logits(self, out: Tensor, h: Tensor, w: Tensor, targets: Targets) -> None:
        """Write the raw logits of soft targets to `out` (N, K)."""
        assert targets.soft is not None
        order = row_order(targets.order, targets.index)
        of = self.kernels.row_sums
        kernel = SoftLogitsSpec(of.arch, of.dtype)
        compiled(kernel)(h, w, *targets.soft.classes, out, *order)

    def put_soft(self, entries: Tensor | None, exps: Tensor, first: int, targets: Targets) -> None:
        assert targets.soft is not None
        own = *targets.soft.classes, targets.soft.coefficient if entries is None else entries
        of = self.kernels.row_sums
        compiled(PutSoftSpec(of.arch, of.dtype))(exps, *own, first, int(entries is None))

    def scale_soft(
        self,
        entries: Tensor,
        lead: Tensor,
        exps: Tensor,
        first: int,
        targets: Targets,
        scale: Tensor,
    ) -> None:
        assert targets.soft is not None
        own = *targets.soft.classes, entries, targets.index, lead.contiguous()
        of = self.kernels.row_sums
        spec = PutSoftSpec(of.arch, of.dtype, scales=True)
        compiled(spec)(exps, *own, scale.contiguous(), first)
