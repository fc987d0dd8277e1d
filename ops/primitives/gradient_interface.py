"""The steps from exponentials to gradients, as an interface, in the symbols of `interface`."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.scaling import Scaling
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

TargetGradT = TypeVar("TargetGradT")
"""The targets' part of dW, in the form of one implementation of `Gradients`."""


class Gradients(Protocol[TargetGradT]):
    """From exponentials to dX and dW: the two GEMMs and what is done to their results.

    On a CPU, `add_grad_hidden`, `finish_dw` and `keep_dw` without `low` take `SampledExps`, too.
    """

    lists_targets: bool
    """Whether a `target_grad` of all tokens takes little memory: lists of the tokens of each class,
    not sums of their terms.  The last chunk then adds those of all chunks."""

    def add_grad_hidden(
        self,
        sums: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        in_windows: bool = False,
        selection: RowSelection | None = None,
        factor: Tensor | None = None,
    ) -> bool:
        """Write `exps` (N, K) @ w (K, D) to `sums` (N, D), or add it if `accumulate`.

        `in_windows` says that these are some columns of a step, whose products kernels add without
        cuBLAS.  With `selection`, rows of tokens that do not count are undefined.

        Return whether `exps` are multiplied by `factor` (N,) afterwards, as they are where the
        kernel of the product can do so.
        """
        ...

    def scaling(
        self,
        dtype: torch.dtype,
        targets: Targets,
        stats: RowStats,
        upstream: Tensor,
        *,
        in_reference: bool,
    ) -> Scaling:
        """Return where tokens' factors are applied; see `rows.scaling.scaling_of`."""
        ...

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x`."""
        ...

    def finish_dx(
        self,
        out: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Write scale_i sums_i + target_i W_y to `out` (N, D), rounded once; may be `sums`.

        With `order` (N,), that is row order_i of `out`, which is not `sums` then.
        `rank_one` (N, D) is added.  A row whose coefficients and factor are all 0 is 0, whatever
        `sums` and w hold.
        """
        ...

    def keep_sums(
        self,
        kept: Tensor,
        low: Tensor,
        sums: Tensor,
        w: Tensor,
        targets: Targets,
        stats: RowStats,
        order: Tensor | None = None,
    ) -> None:
        """Keep sums_i - S_i W_y in `kept` (N, D) and `low`; may overwrite `sums`.

        It is 0 for ignored tokens.  `low` is (N, D) or (N, D / 2) uint8, see
        `rows.kept_sums.split_` for what is kept.  With `order`, that of row i is row
        order_i.
        """
        ...

    def keep_dx(
        self,
        kept: Tensor,
        low: Tensor,
        exps: Tensor,
        w: Tensor,
        *,
        accumulate: bool,
        selection: RowSelection | None = None,
    ) -> None:
        """Keep `exps` (N, K) @ w (K, D) in `kept` (N, D) and `low`, or add it if `accumulate`.

        These are as in `keep_sums`.  With `selection`, rows of tokens that do not count are
        undefined.
        """
        ...

    def scale_kept_rows(self, kept: Tensor, low: Tensor, scale: Tensor) -> None:
        """Multiply the sums of `keep_dx` by `scale` (N,)."""
        ...

    def finish_kept(
        self,
        out: Tensor,
        kept: Tensor,
        low: Tensor,
        w: Tensor,
        targets: Targets,
        coefficients: RowCoefficients,
        rank_one: RankOne | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Do what `finish_dx` does with the sums of `keep_sums` or `keep_dx`.

        `out` (N, D) may be `kept`: then the sums, too, are in the places that `order` says.
        """
        ...

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetGradT:
        """Return Σ_{i: y_i = v} c_i h_i for all v; `coefficient` is c (N,)."""
        ...

    def no_target_grad(self, h: Tensor, targets: Targets) -> TargetGradT:
        """Return what `target_grad` returns for coefficients of 0.

        It is for exponentials that contain the targets' terms.
        """
        ...

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGradT,
        first: int,
        grad_scale: Tensor,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
    ) -> None:
        """Write (expsᵀ @ scaled + target_grad) * grad_scale to `out` (K, D), rounded once.

        `exps` (N, K) are the columns from `first` on; `grad_scale` is ().  `rank_one` (K, D) is
        added before the product with `grad_scale`.  With `selection`, tokens that do not count add
        nothing.
        """
        ...

    def keep_dw(
        self,
        kept: Tensor,
        low: Tensor | None,
        exps: Tensor,
        scaled: Tensor,
        target_grad: TargetGradT,
        first: int,
        rank_one: RankOne | None = None,
        selection: RowSelection | None = None,
        *,
        accumulate: bool,
    ) -> None:
        """Keep what `finish_dw` rounds, of a `grad_scale` of 1, in `kept` (K, D) and `low`.

        It is added to what they hold if `accumulate`.  `low` is (K, D) or (K, D / 2) uint8, see
        `rows.kept_sums.split_` for what is kept; or None if `kept` has the dtype of sums.
        More than eight parameters: operands, and what the last step adds.
        """
        ...

    def finish_kept_dw(self, kept: Tensor, low: Tensor, factor: Tensor) -> None:
        """Write `factor` () times the sums of `keep_dw` to `kept` (V, D), rounded once."""
        ...
