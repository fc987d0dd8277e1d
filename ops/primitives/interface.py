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

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cutefce.cute_kernels.config import WindowConfig
from cutefce.ops.primitives.rows import RowStats, Targets

Partial = Any
"""Row sums over parts of the vocabulary, as `project_exp` hands them to `finish` and `repair_stored_exps`; each
implementation has a form of its own."""

TargetGrad = Any
"""The targets' part of dW, Σ_{i: y_i = v} c_i h_i, as `target_grad` hands it to `finish_dw` and
`add_target_grad`; each implementation has a form of its own."""


class Primitives(Protocol):
    """One implementation of the steps; all tensors of a call lie on one device."""

    @property
    def config(self) -> WindowConfig:
        """How the host walks the vocabulary."""
        ...

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and w in a layout that the other steps take, copied if need be."""
        ...

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
        """Return the row sums of e over the columns of `window`, which begin with a piece.

        `exps` (N, K), if given, receives e over the first K of them, which are whole pieces; the
        columns beyond the vocabulary are undefined.  Where logits lie far above `reference` (N,),
        sums and `exps` may be relative to something else, which the result tells `repair_stored_exps`.
        """
        ...

    def concat_partials(self, partials: Sequence[Partial]) -> Partial:
        """Return the row sums of all columns, given those of windows that lie one after another."""
        ...

    def gather_partials(self, partial: Partial, gather: Callable[[Tensor], Tensor]) -> Partial:
        """Return the row sums of all shards of the vocabulary, for `finish`.

        `gather` maps a tensor (...) to those of all ranks (R, ...).
        """
        ...

    def forward(
        self, h: Tensor, w: Tensor, targets: Targets, reduction: str
    ) -> tuple[RowStats, Tensor]:
        """Do `target_logit`, `project_exp` of all columns and `finish`; nothing is stored."""
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

    def reduce_partials(
        self, partial: Partial, target_logit: Tensor, targets: Targets, reduction: str
    ) -> tuple[RowStats, Tensor]:
        """Join the parts of every row; also return the reduced loss."""
        ...

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        target: Tensor,
        partial: Partial,
        stats: RowStats,
    ) -> None:
        """Make `exps` (N, K), which `project_exp` stored, relative to `stats.reference`.

        They are those of the columns from `first` on; `partial` is that of all columns.
        """
        ...

    def add_grad_hidden(self, sums: Tensor, exps: Tensor, w: Tensor, *, fresh: bool) -> None:
        """Add `exps` (N, K) @ w (K, D) to `sums` (N, D), which has the dtype of sums.

        `fresh` ones hold nothing yet, and are set.
        """
        ...

    def add_grad_weight(self, sums: Tensor, exps: Tensor, scaled: Tensor, *, fresh: bool) -> None:
        """Add `exps`ᵀ (K, N) @ `scaled` (N, D) to `sums` (K, D), which has the dtype of sums.

        `fresh` ones hold nothing yet, and are set.
        """
        ...

    def dx_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of dX as `finish_dx` writes it, for inputs of `dtype`."""
        ...

    def finish_dx(
        self, out: Tensor, sums: Tensor, w: Tensor, targets: Targets, scale: Tensor, weight: Tensor
    ) -> None:
        """Write scale_i (sums_i + weight_i W_y) to `out` (N, D); `out` may be `sums` itself."""
        ...

    def scale_rows(self, out: Tensor, x: Tensor, scale: Tensor) -> None:
        """Write scale_i x_i to `out` (M, D), rounded once; `out` may be `x` itself."""
        ...

    def target_grad(self, h: Tensor, coefficient: Tensor, targets: Targets) -> TargetGrad:
        """Return Σ_{i: y_i = v} c_i h_i for all v, or what it takes; `coefficient` is c (N,)."""
        ...

    def finish_dw(
        self,
        out: Tensor,
        exps: Tensor,
        scaled: Tensor,
        part: TargetGrad,
        first: int,
        unit: Tensor,
    ) -> None:
        """Write (expsᵀ @ scaled + the targets' part) * unit to `out` (K, D), rounding once.

        `exps` (N, K) are the columns from `first` on; `unit` is ().
        """
        ...

    def add_target_grad(self, sums: Tensor, part: TargetGrad, first: int) -> None:
        """Add the targets' part to `sums` (K, D), those of the entries from `first` on."""
        ...


def forward_unfused(
    primitives: Primitives, h: Tensor, w: Tensor, targets: Targets, reduction: str
) -> tuple[RowStats, Tensor]:
    """Do what `Primitives.forward` does by the other steps."""
    logit = primitives.target_logit(h, w, targets)
    partial = primitives.project_exp(h, w, (0, w.shape[0]), logit, targets.index)
    return primitives.reduce_partials(partial, logit, targets, reduction)
