"""What losses of tokens are made of: terms, and soft targets.

`Targets` makes them when they are first used: after the product of hidden states and weight is
launched, if it needs none of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.rows.classes.output_classes import OutputClasses, check_classes
from cutefce.ops.rows.classes.soft_targets import SoftTargets, check_values
from cutefce.ops.rows.loss_terms import LossTerms
from cutefce.ops.rows.selection import RowSelection


class LossParts(NamedTuple):
    """What the losses of N tokens are made of, beside their targets and log-sum-exps."""

    terms: LossTerms | None = None
    """What the loss of a token is made of; None for its cross entropy."""
    soft: SoftTargets | None = None
    """The other classes of tokens with several targets, of which the target is the lead."""
    loss_scale: Tensor | None = None
    """() the factor of each loss in the reduced loss, once it is computed: kept for the backward of
    soft targets."""

    def rows(self, rows: slice | Tensor) -> "LossParts":
        """Return those of some of the tokens, whose losses are not reduced."""
        return LossParts(
            None if self.terms is None else self.terms.rows(rows),
            None if self.soft is None else self.soft.rows(rows),
        )


def parts_of(
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    vocab: int,
    own: slice,
    dtype: torch.dtype,
    arch: str | None = None,
    selection: RowSelection | None = None,
) -> LossParts:
    """Return the parts of losses with targets y (N,) of `vocab` classes; this rank has `own`.

    The others are those of `make_targets`.
    """
    if tensors.target_indices is not None:
        if selection is not None:
            tensors = selection.take_soft_targets(tensors)
        if tensors.target_probs is None:
            return LossParts(soft=OutputClasses.of_leads(y, options, tensors, own, dtype))
        soft, terms = SoftTargets.of(y, options, tensors, vocab, own, dtype, arch)
        return LossParts(terms, soft)
    return LossParts(LossTerms.of(y, options, tensors, vocab, own, dtype))


def check_soft_values(y: Tensor, options: LossOptions, tensors: TensorOptions, vocab: int) -> None:
    """Raise ValueError or IndexError on a CPU for soft targets, or classes, out of their range.

    y (N,) are the leads, `vocab` is that of all ranks.  A GPU is not synchronized for this.
    """
    if y.device.type != "cpu" or tensors.target_indices is None:
        return
    if tensors.target_probs is None:
        check_classes(tensors.target_indices, options, vocab)
    else:
        soft = tensors.target_indices, tensors.target_probs
        check_values(without_weightless(y, options, tensors), options, *soft, vocab)


def without_weightless(y: Tensor, options: LossOptions, tensors: TensorOptions) -> Tensor:
    """Return the targets y (N,), ignored where the token's weight is 0."""
    weights = tensors.token_weights
    return y if weights is None else torch.where(weights == 0, options.ignore_index, y)
