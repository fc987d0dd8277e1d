"""The end of the bias' gradient, whose sums over tokens each strategy forms."""

from torch import Tensor

from cutefce.ops.rows.targets import Targets


def finish_dbias(
    dbias: Tensor, targets: Targets, target: Tensor | None, every: Tensor | None
) -> None:
    """Add the terms of targets (N,) and of every class to the sums of the bias' gradient (V,).

    Those of targets may be in the sums.
    """
    if target is not None:
        dbias.index_put_((targets.safe_index,), target, accumulate=True)  # deterministic
    if every is not None and targets.terms is not None:
        weight = targets.terms.class_weight
        dbias.add_(every.sum() if weight is None else every.sum() * weight)
    if targets.logits is not None and targets.logits.scale != 1:
        dbias.div_(targets.logits.scale)
