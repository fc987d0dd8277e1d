"""The steps that every strategy is made of, as an interface.

With target y_i, logits z = h wᵀ and a reference ρ_i that is known before the projection
(the target's own logit r_i = z_iy, unless a row has a far larger one):

    e_iv = exp(z_iv - ρ_i), and 0 at v = y_i      S_i = Σ_v e_iv      T_i = exp(r_i - ρ_i) + S_i
    loss_i = ρ_i - r_i + log T_i                  s_i = g_i / T_i
    dX_i = s_i (Σ_v e_iv W_v - S_i W_y)
    dW_v = Σ_i e_iv s_i h_i - Σ_{i: y_i = v} s_i S_i h_i

In the shapes below N is tokens, D hidden, V vocab.  The dtype of sums is float32, or float64
for float64 inputs; exponentials and gradients have the dtype of the inputs.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Targets:
    """The targets of N rows and which of them count."""

    index: Tensor
    """(N,) int64 as given: may hold ignored and out-of-range values."""
    active: Tensor
    """(N,) bool: the row is not ignored."""
    address: Tensor
    """(N,) int64 within [0, V): what may be used to read or write memory."""


@dataclass(frozen=True)
class Partial:
    """Row sums over pieces of the vocabulary, each piece relative to its own reference."""

    sums: Tensor
    """(N, pieces) sums of exponentials."""
    references: Tensor
    """(N, pieces) what they are relative to."""


@dataclass(frozen=True)
class Stats:
    """What the backward needs to know of every row; each (N,) in the dtype of sums."""

    reference: Tensor
    """ρ, what stored and recomputed exponentials are relative to; +inf for ignored rows."""
    sum: Tensor
    """S, the exponentials of all columns but the target's."""
    total: Tensor
    """T, which has the target's own exponential too."""


@dataclass(frozen=True)
class TargetRows:
    """The targets' part of dW, one line for each target that occurs."""

    sums: Tensor
    """(K, D) in the dtype of sums."""
    line: Tensor
    """(V,) int64: the line of a vocabulary entry; entries that are no target share a line of 0."""


class Primitives(Protocol):
    """One implementation of the steps; all tensors of a call lie on one device."""

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored rows, NaN for targets outside [0, V)."""
        ...

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> Partial:
        """Return the row sums of e over the columns [first, last) = `window`.

        A piece whose largest logit lies far above `reference` (N,) uses that one as its reference
        instead.  `exps` (N, K), if given, receives e; K is last - first, rounded up to whole
        pieces, and the columns beyond the window are undefined.
        """
        ...

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor,
    ) -> None:
        """Write e over the columns of `window`, relative to `reference`, to `exps` (N, K)."""
        ...

    def finish(self, partials: list[Partial], target_logit: Tensor) -> tuple[Stats, Tensor]:
        """Join the pieces of all windows; also return loss_i (N,), which is 0 for ignored rows."""
        ...

    def settle(self, exps: Tensor, partials: list[Partial], stats: Stats) -> None:
        """Make `exps` (N, K), the pieces that were stored, relative to `stats.reference`."""
        ...

    def multiply(self, out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
        """Write `a @ b` to `out`, which has the dtype of sums, or `add` it."""
        ...

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, stats: Stats, scale: Tensor
    ) -> None:
        """Write s_i (sums_i - S_i W_y) to `out` (N, D); `out` may be `sums` itself."""
        ...

    def scale_rows(self, h: Tensor, scale: Tensor) -> Tensor:
        """Return s_i h_i (N, D) in h's dtype."""
        ...

    def add_target_rows(self, out: Tensor, h: Tensor, scale: Tensor, line: Tensor) -> None:
        """Add scale_i h_i to line_i of `out`, which has the dtype of sums; always in one order."""
        ...

    def collect_target_rows(
        self, h: Tensor, scale: Tensor, targets: Targets, vocab: int
    ) -> TargetRows:
        """Sum scale_i h_i over the rows of each target."""
        ...

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        target_rows: TargetRows,
        first: int,
        unit: Tensor | None,
    ) -> None:
        """Write (expsᵀ @ scaled + the targets' part) * unit to `out` (K, D), rounding once.

        `exps` (N, K) are the columns from `first` on; `unit` () is 1 if None.
        """
        ...
