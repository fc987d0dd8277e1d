"""Σ_v κ_v u_iv of every token: for label smoothing, and the mean logit as an output.

Without a softcap it needs no product of h and w, but only the class row Σ_v κ_v W_v.
"""

from torch import Tensor

from cutefce.ops.parallel.shard import Unsharded
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.targets import Targets


def needs_class_row(targets: Targets) -> bool:
    """Whether the loss, or an output of the call, depends on the class row."""
    return smooths(targets) or "mean_logit" in targets.options.output_names


def smooths(targets: Targets) -> bool:
    """Whether the loss has label smoothing."""
    return targets.terms is not None and targets.terms.has_class_row


def set_class_logits(shard: Unsharded, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
    """Set `targets.class_logits`, of all ranks' classes; return the class row (D,) of w (V, D)."""
    kappa = None if targets.terms is None else targets.terms.class_weight
    row, logits = weighted_sum(w, kappa), targets.logits
    result = weighted_sum(h.t(), shard.sum_of_ranks(row))
    if targets.selection is not None:
        result = targets.selection.take(result)
    if logits is not None and logits.bias is not None:
        result += shard.sum_of_ranks((logits.bias * class_weights(targets.terms, w)).sum())
    if logits is not None and logits.row_scale is not None:
        result *= logits.row_scale
    targets.class_logits = result if smooths(targets) else result / shard.total_vocab(w)
    return row
