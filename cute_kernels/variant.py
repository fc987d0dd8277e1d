"""Variants of the kernels: what options of the loss compile into them."""

from typing import NamedTuple


class LogitTransform(NamedTuple):
    """The map from raw logits t = h·w to the model's: u = κ (t + b), or u = κ tanh(s (t + b)).

    Its operands are launch arguments; its arithmetic is in `common.logit_transform`.
    """

    row_scale: bool = False
    """Whether there is a factor κ_i of each row; otherwise κ is 1."""
    bias: bool = False
    """Whether there is a bias b_v of each column; otherwise b is 0."""
    softcap: bool = False
    """Whether logits are capped by tanh, with slope s; implies `row_scale`."""


class RowReductions(NamedTuple):
    """Row reductions beside Σ exp: none yet.

    Accumulators such as those of entropy become compile-time fields here; their arithmetic
    belongs into `common.online_softmax.accumulate`.
    """


IDENTITY, SUM_ONLY = LogitTransform(), RowReductions()


class KernelVariant(NamedTuple):
    """What the options of a call add to its kernels."""

    transform: LogitTransform = IDENTITY
    reductions: RowReductions = SUM_ONLY
    rank_one: bool = False
    """Whether the gradients have a rank-one term."""


PLAIN = KernelVariant()
