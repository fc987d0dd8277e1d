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
    floor: bool = False
    """Whether logits below that of their row, but for the target's, become -inf."""


class RowReductions(NamedTuple):
    """Row reductions beside Σ exp.

    Their output is a launch argument; their arithmetic is in `common.row_reductions`.
    """

    entropy: bool = False
    """The mean logit under the softmax of all columns."""
    sum_squares: bool = False
    """The sum of squared exponentials of all columns."""
    of_others: bool = False
    """Of all columns but the target's, the largest logit, its vocabulary entry, and how many are
    above the target's."""

    @property
    def of_all(self) -> bool:
        """Whether some are over all columns: those need their largest logit and Σ exp, too."""
        return self.entropy or self.sum_squares

    @property
    def planes(self) -> int:
        """Planes of the output (K, N, P): 2 with `of_all`, 1 for each sum, 3 of others."""
        return 2 * self.of_all + self.entropy + self.sum_squares + 3 * self.of_others


IDENTITY, SUM_ONLY = LogitTransform(), RowReductions()


class KernelVariant(NamedTuple):
    """What the options of a call add to its kernels."""

    transform: LogitTransform = IDENTITY
    reductions: RowReductions = SUM_ONLY


PLAIN = KernelVariant()
