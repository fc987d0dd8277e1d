"""What losses of tokens are made of: terms, and soft targets.

`Targets` makes them when they are first used: after the product of hidden states and weight is
launched, if it needs none of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.rows.loss_terms import GivenTargets, LossTerms
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.soft_targets.leads import LARGEST, is_outside, is_wrong
from cutefce.ops.soft_targets.output_classes import OutputClasses
from cutefce.ops.soft_targets.targets import SoftTargets


class LossParts(NamedTuple):
    """What the losses of N tokens are made of, beside their targets and log-sum-exps."""

    terms: LossTerms | None = None
    """What the loss of a token is made of; None for its cross entropy."""
    soft: SoftTargets | None = None
    """The other classes of tokens with several targets, of which the target is the lead."""

    def rows(self, rows: slice | Tensor) -> "LossParts":
        """Return those of some of the tokens."""
        return LossParts(
            None if self.terms is None else self.terms.rows(rows),
            None if self.soft is None else self.soft.rows(rows),
        )


def parts_of(x: GivenTargets, selection: RowSelection | None = None) -> LossParts:
    """Return the parts of losses, of soft targets of all tokens those that `selection` has."""
    if x.tensors.target_indices is None:
        return LossParts(LossTerms.of(x))
    if selection is not None:
        x = x._replace(tensors=selection.take_soft_targets(x.tensors))
    if x.tensors.target_probs is None:
        return LossParts(soft=OutputClasses.of_leads(x))
    soft, terms = SoftTargets.of(x)
    return LossParts(terms, soft)


def check_soft_values(y: Tensor, options: LossOptions, tensors: TensorOptions, vocab: int) -> None:
    """Raise ValueError or IndexError on a CPU for soft targets, or classes, out of their range.

    y (N,) are the leads, `vocab` is that of all ranks.  A GPU is not synchronized for this.
    """
    indices, probs, ignored = tensors.target_indices, tensors.target_probs, options.ignore_index
    if y.device.type != "cpu" or indices is None:
        return
    more, expected = "", f"0 <= index < {vocab} or ignore_index={ignored}"
    if probs is None:
        wrong = (indices != ignored) & is_outside(indices, vocab)
    else:
        counts = (without_weightless(y, options, tensors) != ignored)[:, None]
        bad = counts & ~((probs >= 0) & (probs <= LARGEST))
        if bool(bad.any()):
            raise ValueError(
                f"target_probs: got {float(probs[bad][0])} at {_place_of_first(bad)}, expected "
                f"numbers from 0 to {LARGEST:.3g}"
            )
        wrong = counts & is_wrong(indices, probs, vocab)
        expected = f"0 <= index < {vocab} where the probability is not 0"
        more = f" with probability {float(probs[wrong][0])}" if bool(wrong.any()) else ""
    if bool(wrong.any()):
        raise IndexError(
            f"target_indices: got {int(indices[wrong][0])} at {_place_of_first(wrong)}{more}, "
            f"expected {expected}"
        )


def _place_of_first(bad: Tensor) -> str:
    """Return the place of the first bad value (N, K), tokens being numbered through."""
    token, k = bad.nonzero()[0].tolist()
    return f"token {token}, k = {k}"


def without_weightless(y: Tensor, options: LossOptions, tensors: TensorOptions) -> Tensor:
    """Return the targets y (N,), ignored where the token's weight is 0."""
    weights = tensors.token_weights
    return y if weights is None else torch.where(weights == 0, options.ignore_index, y)
