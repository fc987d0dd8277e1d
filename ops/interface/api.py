"""The public call, with the names and defaults of torch's `linear_cross_entropy`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import cutefce.ops.interface.call  # noqa: F401  (registers torch.ops.cutefce)
from cutefce.ops.parallel.dtensor import localise


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    workspace: int | str | None = None,
    denominator: Tensor | float | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Cross entropy of softmax(input @ linear_weight.T) against target, without the logits.

    Takes what `torch.nn.functional.linear_cross_entropy` takes, a `workspace`, a `denominator`, and
    a `group` of ranks over which the vocabulary is sharded.  A `linear_weight` that is a DTensor
    with placement Shard(0) names its group itself, and an `input` with Shard(dim of tokens) says
    `sequence_parallel`; their gradients are placed as they are.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device.
        target: (...) integer class indices in [0, V), or `ignore_index`.
        reduction: "mean" over the targets that are not ignored (0 if there is none), "sum" or
            "none".
        ignore_index: rows with this target have loss 0 and gradient 0; None is -100.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may take for
            speed; "min", "max", or None for 2.5 GiB.
        denominator: a number or () on input's device, what "mean" divides by instead: so that
            microbatches, or ranks with other tokens, add up to the mean of one big batch.  With 0
            the loss is 0.
        group: every rank of it holds a part (V_k, D) of the weight in order of the ranks, V being
            the sum of all V_k.  Targets, which are global ids, and all else are the same on every
            rank; so are the loss and the gradient of input.
        shards: V_k of every rank; None if they are equal.
        sequence_parallel: input is this rank's part of the tokens, an equal share of the first
            dimension in order of the ranks, and so is its gradient.  Targets, and losses with
            "none", are those of all tokens.
        linear_bias: not served yet.
        weight: not served yet.
        label_smoothing: not served yet.
        options: torch's chunking options, which `workspace` takes the place of; not served.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.

    Raises:
        NotImplementedError: naming an argument that is not served yet.
        TypeError, ValueError: naming the argument, what was got and what is expected; on every
            rank of the group, if its ranks do not agree.
        RuntimeError: if another rank of the group failed, or made no such call in time.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not waited for,
            such a row's loss and the gradients that it takes part in are NaN.

    The formulas stand in `cutefce.ops.primitives.interface`; the streaming form of the loss is that of
    "From Projection to Prediction: Beyond Logits for Scalable Language Models",
    arXiv 2511.17599.
    """
    refuse_unserved(
        linear_bias=linear_bias, weight=weight, label_smoothing=label_smoothing, options=options
    )
    if isinstance(denominator, (int, float)):
        denominator = torch.full((), denominator, dtype=torch.float64, device=input.device)
    call = localise(input, linear_weight, target, group, shards, sequence_parallel)
    result: Tensor = torch.ops.cutefce.loss(
        call.h,
        call.w,
        call.y,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        workspace=workspace,
        denominator=denominator,
        group=call.group,
        shards=call.shards,
        sequence_parallel=call.sequence_parallel,
    )
    return result.movedim(0, call.dim) if result.ndim else result


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the names of `torch.nn.LinearCrossEntropyLoss`.

    `linear.weight` (num_classes, in_features) is the head's parameter, as in torch's module, so
    that state dicts are exchanged freely; sharded by vocabulary, as a DTensor, it selects the group
    that shares the loss.  The other arguments are those of
    `linear_cross_entropy`.

    Shapes: forward takes input (..., in_features) and target (...).
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        workspace: int | str | None = None,
    ) -> None:
        super().__init__()
        refuse_unserved(
            out_features=out_features,
            bias=bias,
            weight=weight,
            label_smoothing=label_smoothing,
            options=options,
        )
        self.linear = nn.Linear(in_features, num_classes, bias=False, device=device, dtype=dtype)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.workspace = workspace

    def forward(
        self, input: Tensor, target: Tensor, denominator: Tensor | float | None = None
    ) -> Tensor:
        """Return the loss of input (..., in_features) against target (...)."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            workspace=self.workspace,
            denominator=denominator,
        )

    def extra_repr(self) -> str:
        """Show what differs from call to call."""
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"workspace={self.workspace!r}"
        )


UNSERVED_DEFAULTS: dict[str, Any] = {"label_smoothing": 0.0, "out_features": (), "bias": False}


def refuse_unserved(**arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that is not at its default."""
    for name, value in arguments.items():
        default = UNSERVED_DEFAULTS.get(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name}: got {got}, expected {default!r}; cutefce does not serve it yet"
            )
