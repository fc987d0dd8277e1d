"""What kernels are compiled with and given for the options of a call."""

from typing import Any

from cutefce.cute_kernels.variant import (
    IDENTITY,
    PLAIN,
    KernelVariant,
    LogitTransform,
    RowReductions,
)
from cutefce.ops.rows.targets import Targets


def variant_of(targets: Targets | None) -> KernelVariant:
    """Return what kernels must be compiled with for the options of a call."""
    if targets is None or targets.is_plain:
        return PLAIN
    logits, names = targets.logits, targets.options.output_names
    transform = IDENTITY
    if logits is not None:
        given = logits.row_scale is not None, logits.bias is not None, logits.slope is not None
        transform = LogitTransform(*given)
    argmax = "is_top1" in names or "argmax" in names
    reductions = RowReductions("entropy" in names, "sum_p_squared" in names, argmax)
    return KernelVariant(transform, reductions)


def launch_transform(targets: Targets, window: tuple[int, int]) -> tuple[Any, ...] | None:
    """Return the logit transform of a launch over the columns of `window`."""
    return None if targets.logits is None else targets.logits.columns(*window)
