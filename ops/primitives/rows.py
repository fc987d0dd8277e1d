"""Per-token data of a call: targets, statistics after the forward, coefficients of the gradients.

With z_iv the logits of token i, and e_iv their exponentials relative to the reference ρ_i (0 at the
target y_i), the gradient of a loss is

    dL/dz_iv = scale_i e_iv  (v ≠ y_i)        dL/dz_iy = target_i

Options that only change these two numbers, such as z-loss or class weights, are served by
`RowCoefficients` alone: no GEMM and no kernel knows them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import NUM_STATS, Stat
from cutefce.ops.interface.options import LossOptions, TensorOptions

NO_TENSORS = TensorOptions()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Targets:
    """The targets of N tokens with the options of their losses; derived tensors are lazy."""

    def __init__(
        self,
        index: Tensor,
        vocab: int,
        options: LossOptions,
        tensors: TensorOptions = NO_TENSORS,
    ) -> None:
        self.index = index
        """(N,) int64 as given: may hold ignored and out-of-range values."""
        self.vocab = vocab
        self.options = options
        self.tensors = tensors

    @cached_property
    def active(self) -> Tensor:
        """(N,) bool: the token is not ignored."""
        return self.index != self.options.ignore_index

    @cached_property
    def safe_index(self) -> Tensor:
        """(N,) int64 clamped to [0, V): may be used to address memory."""
        return self.index.clamp(0, self.vocab - 1)

    @property
    def divides_by_count(self) -> bool:
        """Whether the reduced loss is the sum over the number of active tokens."""
        return self.options.reduction == "mean" and self.tensors.denominator is None

    def loss_scale(self, dtype: torch.dtype) -> Tensor:
        """Return () the factor of each active token's loss in the reduced loss."""
        if self.divides_by_count:
            return self.active.sum().clamp(min=1).to(dtype).reciprocal()
        denominator = self.tensors.denominator
        if denominator is not None:
            return torch.where(denominator == 0, 0, denominator.to(dtype).reciprocal())
        return torch.ones((), dtype=dtype, device=self.index.device)

    @property
    def owned(self) -> Tensor:
        """(N,) bool: the token is active, and its target is a row of this weight."""
        return self.active & (self.safe_index == self.index)

    def per_token(self, rows: slice) -> "Targets":
        """Return the targets of a slice of the tokens, whose losses are not reduced."""
        return Targets(self.index[rows], self.vocab, self.options.per_token(), self.tensors)


def make_targets(y: Tensor, vocab: int, options: LossOptions, tensors: TensorOptions) -> Targets:
    """Return the targets y (N,) int64.

    Raises:
        IndexError: on a CPU, for a target outside [0, V).  A GPU is not synchronized for this.
    """
    targets = Targets(y.contiguous(), vocab, options, tensors)
    if y.device.type == "cpu":
        wrong = targets.active & (targets.safe_index != y)
        if bool(wrong.any()):
            raise IndexError(
                f"target: got {int(y[wrong][0])}, expected 0 <= target < {vocab} "
                f"or ignore_index={options.ignore_index}"
            )
    return targets


@dataclass(frozen=True)
class RowStats:
    """The statistics of every token after the forward, in the dtype of sums."""

    rows: Tensor
    """(NUM_STATS, N), indexed by `Stat`."""

    @staticmethod
    def empty(like: Tensor, tokens: int) -> "RowStats":
        """Return uninitialized statistics with the dtype and device of `like`."""
        return RowStats(like.new_empty(NUM_STATS, tokens))

    @property
    def reference(self) -> Tensor:
        """(N,) ρ, what stored and recomputed exponentials are relative to; +inf if ignored."""
        return self.rows[Stat.REFERENCE]

    @property
    def sum_exp_others(self) -> Tensor:
        """(N,) S, over all columns but the target's; 0 where another rank owns the target."""
        return self.rows[Stat.SUM_EXP_OTHERS]

    @property
    def sum_exp(self) -> Tensor:
        """(N,) T = exp(r - ρ) + S, which includes the target's exponential.

        1 if ignored; NaN if a logit is NaN or +inf, and where kernels cannot give a gradient.
        """
        return self.rows[Stat.SUM_EXP]

    @property
    def loss(self) -> Tensor:
        """(N,) the token's cross entropy, 0 if ignored."""
        return self.rows[Stat.LOSS]


@dataclass(frozen=True)
class RowCoefficients:
    """The gradient of the loss by the logits: scale_i e_iv, and target_i at the target."""

    scale: Tensor
    """(N,) factor of every exponential but the target's; 0 for ignored tokens."""
    target: Tensor
    """(N,) dL/dz at the target; 0 where another rank owns the target."""

    @staticmethod
    def of(stats: RowStats, targets: Targets, upstream: Tensor) -> "RowCoefficients":
        """Return the coefficients for the upstream gradient, () or (N,), of each token's loss.

        dL/dz_iv = g_i p_iv with p_iv = e_iv / T_i, and at the target g_i (p_iy - 1), written as
        -g_i S_i / T_i, which does not cancel for p → 1.
        """
        scale = torch.where(targets.active, upstream / stats.sum_exp, 0)
        return RowCoefficients(scale, -scale * stats.sum_exp_others)

    def rows(self, rows: slice) -> "RowCoefficients":
        """Return the coefficients of a slice of the tokens."""
        return RowCoefficients(self.scale[rows], self.target[rows])


@dataclass(frozen=True)
class RankOne:
    """A matrix factor ⊗ row that is added to a gradient before it is rounded.

    Label smoothing adds γ ⊗ v to dX and κ ⊗ H to dW.
    """

    factor: Tensor
    """(M,) a factor for each row of the gradient, in the dtype of sums."""
    row: Tensor
    """(D,) in the dtype of sums, contiguous from a multiple of 16 bytes on."""

    def rows(self, rows: slice) -> "RankOne":
        """Return the matrix's rows of a slice."""
        return RankOne(self.factor[rows], self.row)


def token_losses(stats: RowStats, targets: Targets) -> Tensor:
    """Return the loss of every token (N,), 0 if ignored."""
    return stats.loss


def reduce_losses(stats: RowStats, targets: Targets, reduced: Tensor | None = None) -> Tensor:
    """Return the loss, () or (N,); the mean over no active token is 0.

    `reduced` () is what a kernel has reduced `stats.loss` to: their sum, divided already if
    `targets.divides_by_count`.
    """
    options = targets.options
    if reduced is None or options.scales_rows or not options.is_scalar:
        losses = token_losses(stats, targets)
        return losses.sum() * targets.loss_scale(losses.dtype) if options.is_scalar else losses
    if targets.tensors.denominator is None:
        return reduced
    return reduced * targets.loss_scale(reduced.dtype)
