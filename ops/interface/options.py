"""What a call asks for beside its tensors: one frozen record a kind of option.

Each record has its checks, and its part of the operators' schemas and of the no-grad cache's key.
A new option is a field here, and code in the one home of its kind:

    row coefficient    `ops.primitives.rows`: RowCoefficients and the loss of a token
    logit transform    `cute_kernels.spec.LogitTransform`; the portable path has no hook for it yet,
                       which belongs in `ops.primitives.elementwise`
    row reduction      `cute_kernels.spec.RowReductions` and `ops.primitives.elementwise`
"""

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from cutefce.ops.interface import checks
from cutefce.ops.schema import OperatorRecord, argument


@dataclass(frozen=True)
class LossOptions(OperatorRecord):
    """Options that are constants of a compiled graph."""

    reduction: str = argument("str", default="mean")
    """"mean" over active tokens, "sum" or "none"."""
    ignore_index: int = argument("int", in_key=False, default=-100)
    """Tokens with this target have loss 0 and gradient 0; any integer will do."""

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is a scalar, so that every token's loss has one upstream gradient."""
        return self.reduction != "none"

    @property
    def scales_rows(self) -> bool:
        """Whether tokens' exponentials have factors beside upstream / T, of any sign."""
        return False

    def per_token(self) -> "LossOptions":
        """Return the same with a loss for each token."""
        return dataclasses.replace(self, reduction="none")

    def check(self) -> None:
        """Raise ValueError for an unknown reduction."""
        checks.check_reduction(self.reduction)


@dataclass(frozen=True)
class TensorOptions(OperatorRecord):
    """Options that are tensors, on the device of the hidden states."""

    denominator: Tensor | None = argument("Tensor?", default=None)
    """() divisor of "mean"; None for the number of active tokens."""

    @property
    def is_cacheable(self) -> bool:
        """Whether a call may use the no-grad cache, which does not check tensors again."""
        return self.denominator is None

    def check(self, h: Tensor, options: LossOptions) -> None:
        """Raise TypeError or ValueError that names the argument."""
        checks.check_denominator(self.denominator, h, options.reduction)


@dataclass(frozen=True)
class Sharding(OperatorRecord):
    """How a vocabulary, and tokens, are sharded over the ranks of a group."""

    group: str | None = argument("str?", default=None)
    """Name of the process group; None on one device."""
    shards: list[int] | None = argument("int[]?", default=None)
    """Rows of every rank's weight; None if they are equal."""
    sequence_parallel: bool = argument("bool", default=False)
    """Whether h holds this rank's equal share of the tokens."""

    @property
    def is_sharded(self) -> bool:
        """Whether any of it was given."""
        return self.group is not None or bool(self.shards) or self.sequence_parallel

    def ranks(self) -> int:
        """Return the number of ranks that share the call; raise for what needs a group."""
        return checks.rank_count(self.group, self.shards, self.sequence_parallel)

    def check(self, w: Tensor) -> None:
        """Raise ValueError unless `shards` are the rows of all ranks' weights, w being here."""
        checks.check_shards(self.group, self.shards, w)


@dataclass(frozen=True)
class StepOptions(OperatorRecord):
    """What the plan of a training step depends on, beside sizes and the options of the loss."""

    budget: int = argument("int")
    """Bytes that the step may take beyond inputs and gradients."""
    grad_hidden: bool = argument("bool")
    """Whether dX is computed."""
    grad_weight: bool = argument("bool")
    """Whether dW is computed."""
    copied_hidden: int = argument("int", default=0)
    """Bytes per element of the hidden states of which the operator gets a copy; 0 if of none."""
    copied_weight: int = argument("int", default=0)
    """The same of the weight."""


OPTIONS = LossOptions, TensorOptions, Sharding
"""The records of a call, in the order of the operators' arguments."""
