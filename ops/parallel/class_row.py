"""Σ_v κ_v u_iv of every token: for label smoothing, and the mean logit as an output.

Where nothing bounds the logits, it needs no product of h and w, but only the class row Σ_v κ_v W_v.
"""

from torch import Tensor

from cutefce.ops.parallel.shard import VocabShard
from cutefce.ops.primitives.weighted_sum import weighted_sum
from cutefce.ops.rows.loss_terms import class_weights
from cutefce.ops.rows.targets import ClassRow, Targets


def set_class_row(shard: VocabShard, w: Tensor, targets: Targets) -> Tensor:
    """Set `targets.class_row`, of all ranks' classes; return that of this rank's w (V, D)."""
    kappa = None if targets.terms is None else targets.terms.class_weight
    own, logits = weighted_sum(w, kappa), targets.logits
    row, offset = shard.sum_of_ranks(own), None
    if logits is not None and logits.bias is not None:
        offset = shard.sum_of_ranks((logits.bias * class_weights(targets.terms, w)).sum())
    if not targets.options.label_smoothing:
        count = shard.total_vocab(w)
        row, offset = row / count, None if offset is None else offset / count
    targets.class_row = ClassRow(row, offset)
    return own
