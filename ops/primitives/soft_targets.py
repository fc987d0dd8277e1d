"""Row-wise steps of soft targets, on any device: K rows of the weight for each token.

They are the same beside kernels and the portable path: fused by a compiler on a GPU with Triton,
else by blocks of tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from cutefce.ops.planning.step_memory import soft_block_rows
from cutefce.ops.primitives.elementwise import add_soft_rows_, can_fuse, fused, gathered_dots_
from cutefce.ops.primitives.row_blocks import blocks
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.targets import Targets


class SoftTargetSteps:
    """The step of `cutefce.ops.primitives.interface.Projection` that soft targets add."""

    def soft_excess(self, h: Tensor, w: Tensor, targets: Targets, target_logit: Tensor) -> Tensor:
        """Return Σ_k b (u - r) (N,) of this rank's soft targets, and keep u."""
        soft, logits = targets.soft, targets.logits
        assert soft is not None
        u = soft.coefficient.new_empty(soft.index.shape)
        if targets.selection is None:
            order = torch.arange(len(u), device=u.device)
        else:
            order = targets.selection.order
        _apply_by_token(gathered_dots_, u, soft.index, order, whole=(h, w))
        if logits is not None:
            u = logits.apply_at(u, soft.index)
        soft.logits = u
        return soft.excess_of(u, target_logit)


def add_soft_targets(
    sums: Tensor, w: Tensor, targets: Targets, coefficients: RowCoefficients
) -> RowCoefficients:
    """Make `sums` (N, D) scale_i sums_i + Σ_k others_ik w_{c_ik}; return what is left to do."""
    soft, others, scale = targets.soft, coefficients.others, coefficients.scale
    assert soft is not None and others is not None
    _apply_by_token(add_soft_rows_, sums, soft.index, others, scale, whole=(w,))
    is_zero = (scale == 0) & (coefficients.target == 0) & (others == 0).all(1)
    if coefficients.every is not None:
        is_zero &= coefficients.every == 0
    return replace(coefficients, scale=torch.where(is_zero, 0, torch.ones_like(scale)), others=None)


def _apply_by_token(
    function: Callable[..., None],
    out: Tensor,
    index: Tensor,
    *rowwise: Tensor,
    whole: tuple[Tensor, ...],
) -> None:
    """Call `function` fused, or on blocks of tokens; it gathers rows `index` (N, K) of w (V, D)."""
    if can_fuse(out):
        fused(function)(out, index, *rowwise, *whole)
        return
    elements = index.shape[1] * whole[-1].shape[1]
    size = soft_block_rows(elements, out.element_size(), out.device.type)
    for rows in blocks(len(out), size):
        function(out[rows], index[rows], *(x[rows] for x in rowwise), *whole)
