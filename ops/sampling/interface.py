"""The steps of sampled gradients, as an interface, in the symbols of `interface`."""

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from cutefce.ops.primitives.interface import PartialT, Projection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimate_classes import EstimateClasses
from cutefce.ops.sampling.samples import Samples, Sampling


class SamplingProjection(Projection[PartialT], Protocol):
    """A `Projection` that chooses entries of the exponentials."""

    def choose_classes(self, targets: Targets, sampling: Sampling) -> EstimateClasses:
        """Return what `estimate_classes` does."""
        ...

    def target_places(self, chosen: EstimateClasses, targets: Targets) -> tuple[Tensor, Tensor]:
        """Return what `estimate_classes.target_places` does."""
        ...

    def class_rows(self, x: Tensor, classes: Tensor) -> Tensor:
        """Return the rows (C, ...) of x (V, ...), the weight or the bias, of global `classes`."""
        ...

    def share(self, count: int) -> slice:
        """Return which of `count` classes this rank computes."""
        ...

    def estimate_lse(
        self,
        frequent: PartialT | None,
        drawn: PartialT,
        log_ratio: float,
        target_logit: Tensor,
    ) -> Tensor:
        """Return l̂ (N,) of row sums over frequent and over drawn classes; +inf if ignored.

        A drawn class stands for exp(`log_ratio`) classes.  The target is not in these sums.
        """
        ...

    def sample(
        self,
        h: Tensor,
        w: Tensor,
        reference: Tensor,
        estimate: Tensor,
        targets: Targets,
        sampling: Sampling,
    ) -> tuple[PartialT, Any]:
        """Return the row sums of e over all columns, and the entries that are kept.

        These are `Samples` or, on kernels, `KernelSamples`.  The sums have the bits of those of
        `project_exp`.  Entry (i, v) is kept with probability q = min(1, p̂ / θ), p̂ the stored
        exponential relative to `estimate` (N,) of lse, by the bits of `sampling.random_bits`; a
        stored exponential has the factor du/dt of a softcap.  The `exps` of the result are
        p̂ / (q θ), which is 1 unless q is: they are relative to the estimate, and their unit is θ,
        until `finish_samples`.
        """
        ...

    def finish_samples(
        self,
        samples: Any,
        h: Tensor,
        w: Tensor,
        stats: RowStats,
        targets: Targets,
        sampling: Sampling,
    ) -> None:
        """Make what `sample` has returned ready for a backward, once the statistics are known."""
        ...

    def sampled_exps(
        self,
        h: Tensor,
        w: Tensor,
        samples: Samples,
        reference: Tensor,
        targets: Targets,
        window: int,
    ) -> Iterator[tuple[int, int, Any]]:
        """Yield [first, last) of the columns in order, and what products take for exponentials.

        These are the entries of the columns, and all exponentials of tokens that are done exactly,
        relative to `reference` (N,).  The steps of `Gradients` take them as `exps`.
        """
        ...
