"""What the steps of programs launch, as interfaces.

With target y_i, logits z = h wᵀ and a reference ρ_i that is known before the projection
(the target's own logit r_i = z_iy, unless a row has a far larger one):

    e_iv = exp(z_iv - ρ_i), and 0 at v = y_i      S_i = Σ_v e_iv      T_i = exp(r_i - ρ_i) + S_i
    loss_i = ρ_i - r_i + log T_i                  s_i = g_i / T_i
    dX_i = s_i Σ_v e_iv W_v + c_i W_y             c_i = -s_i S_i
    dW_v = Σ_i e_iv s_i h_i + Σ_{i: y_i = v} c_i h_i

s and c are `RowCoefficients`.  A loss that adds γ_i κ_v to dL/dz_iv, as label smoothing does, adds
a `RankOne` to dX and to dW.  In the shapes below N is tokens, D hidden, V vocab.  The dtype of sums
is float32, or float64 for float64 inputs; exponentials and gradients have the inputs' dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from cutefce.cute_kernels.config import WindowConfig
from cutefce.ops.primitives.gradient_interface import Gradients, TargetGradT
from cutefce.ops.rows.outputs import PartialOutputs
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

PartialT = TypeVar("PartialT")
"""Row sums over parts of the vocabulary, in the form of one implementation of `Projection`."""


class Projection(Protocol[PartialT]):
    """From hidden states and weight to exponentials, their row sums and the loss."""

    def prepare(self, h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and w in a layout that the other steps accept, copied if necessary."""
        ...

    def select(
        self,
        h: Tensor,
        selection: RowSelection,
        scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the rows (M, D) of h (N, D) in the order of `selection`, times `scale` (M,).

        Rows of tokens that do not count are 0.  They are written to `out` if given.
        """
        ...

    def target_logit(self, h: Tensor, w: Tensor, targets: Targets) -> Tensor:
        """Return r (N,): +inf for ignored tokens alone, NaN for targets outside [0, V).

        With `targets.selection`, h has the rows of all tokens, in the order of the call.  With
        `targets.class_row`, the class logits of the targets are set too.
        A logit of +inf becomes NaN: no value of a logit makes its token an ignored one.
        """
        ...

    def empty_soft_logits(self, targets: Targets) -> Tensor | None:
        """Return memory (N, K) for raw logits of soft targets.

        None if `project_exp` does not compute them, or their excess is known.
        """
        ...

    def soft_excess(self, h: Tensor, w: Tensor, targets: Targets, target_logit: Tensor) -> Tensor:
        """Return Σ_k b (u - r) (N,) of the soft targets; h is as for `target_logit`.

        Their logits are `targets.soft_logits`, if `project_exp` of all columns has set these.
        """
        ...

    def put_soft(self, entries: Tensor | None, exps: Tensor, first: int, targets: Targets) -> None:
        """Write the `SoftTargets.entries` (N, K) to `exps` (N, W), of columns from `first` on.

        None is for entries of 0.
        """
        ...

    def scale_soft(
        self,
        entries: Tensor,
        lead: Tensor,
        exps: Tensor,
        first: int,
        targets: Targets,
        scale: Tensor,
        is_scaled: bool = False,
    ) -> None:
        """Multiply `exps` and `entries` by `scale` (N,), and do what `put_soft` does.

        Also put `lead` (N,) in the places of the targets.  If `is_scaled`, `exps` were multiplied
        before.
        """
        ...

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor | None = None,
    ) -> PartialT:
        """Return the row sums of e over the columns of `window`, [first, last).

        `exps` (N, K), if given, receives e over the first K columns; those beyond the vocabulary
        are undefined.  The portable path needs a `first` and a K of whole reference blocks.  Where
        logits are far above `reference` (N,), sums and `exps` may be relative to another reference,
        which the result tells `repair_stored_exps`.
        """
        ...

    def concat_partials(self, partials: Sequence[PartialT]) -> PartialT:
        """Return the row sums of all columns from those of consecutive windows."""
        ...

    def gather_partials(self, partial: PartialT, gather: Callable[[Tensor], Tensor]) -> PartialT:
        """Return the row sums of all vocabulary shards.

        `gather` maps a tensor (...) to those of all ranks (R, ...).
        """
        ...

    def partial_outputs(self, partial: PartialT, target_logit: Tensor) -> PartialOutputs:
        """Return the reductions that were computed beside the row sums, of all partials."""
        ...

    def recompute_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        targets: Targets,
        exps: Tensor,
    ) -> None:
        """Write e over the columns of `window`, relative to `reference`, to `exps` (N, K)."""
        ...

    def reduce_partials(
        self, partial: PartialT, target_logit: Tensor, targets: Targets
    ) -> tuple[RowStats, Tensor]:
        """Reduce the partial sums of every token; also return the reduced loss."""
        ...

    def repair_stored_exps(
        self,
        exps: Tensor,
        h: Tensor,
        w: Tensor,
        first: int,
        targets: Targets,
        partial: PartialT,
        stats: RowStats,
    ) -> None:
        """Make `exps` (N, K), which `project_exp` stored, relative to `stats.reference`.

        `exps` are of the columns from `first` on, `partial` is of all columns.
        """
        ...

    def far_rows(self, partial: PartialT, targets: Targets) -> RowSelection | None:
        """Return the tokens to compute again: all if a reference was moved, else none.

        Only the device knows their number, N or 0.  None: all are computed.
        """
        ...


@dataclass(frozen=True)
class WrappedProjection(Generic[PartialT]):
    """A `Projection` some steps of which a subclass defines; the others are those of `own`."""

    own: Projection[PartialT]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


@dataclass(frozen=True)
class Primitives(Generic[PartialT, TargetGradT]):
    """One implementation of the steps; all tensors of a call are on one device."""

    config: WindowConfig
    projection: Projection[PartialT]
    gradients: Gradients[TargetGradT]


AnyPrimitives = Primitives[Any, Any]
"""The primitives of some implementation, as `dispatch` chooses them at run time."""


def expect_soft_logits(projection: Projection[PartialT], targets: Targets) -> None:
    """Let the next `project_exp` of all columns write the logits of soft targets, if it can."""
    if targets.tensors.target_indices is not None:
        targets.soft_logits = projection.empty_soft_logits(targets)
