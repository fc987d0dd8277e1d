"""The public call, with the names and defaults of torch's `linear_cross_entropy`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cutefce.ops import torch_compat
from cutefce.ops.interface import checks
from cutefce.ops.interface.call import loss
from cutefce.ops.interface.context import autocast
from cutefce.ops.interface.options import LossOptions, Sharding, StepOptions
from cutefce.ops.interface.plans import plan_for
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.parallel.dtensor import localize, replicated
from cutefce.ops.planning.planner import Plan
from cutefce.ops.primitives.dispatch import copied_item_bytes


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

    The parameters are those of `torch.nn.functional.linear_cross_entropy`, a `workspace`, a
    `denominator`, and a `group` of ranks over which the vocabulary is sharded.  A `linear_weight`
    that is a DTensor with placement Shard(0) selects its group itself beside an `input` that is a
    DTensor, and needs `group` beside a plain one.  An `input` with Shard(dim of tokens) selects
    `sequence_parallel`; gradients have the placements of their tensors.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device.
        target: (...) integer class indices in [0, V), or `ignore_index`.
        reduction: "mean" over the targets that are not ignored (0 if all are), "sum" or "none".
        ignore_index: tokens with this target have loss 0 and gradient 0; None is -100.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may use for
            speed; "min", "max", or None for 2.5 GiB.
        denominator: divisor of "mean", a number or () on input's device, so that microbatches, or
            ranks with different tokens, add up to the mean of one large batch.  With 0 the loss
            is 0.
        group: process group whose ranks hold consecutive parts (V_k, D) of the weight, in rank
            order.  Targets are global ids; they and all other arguments are the same on every
            rank, and so are the loss and the gradient of input.
        shards: V_k of every rank; None if they are equal.
        sequence_parallel: input holds this rank's equal share of the first dimension, in rank
            order, and so does its gradient.  Targets, and losses with "none", are those of all
            tokens.
        linear_bias: not served yet.
        weight: not served yet.
        label_smoothing: not served yet.
        options: torch's chunking options; not served, use `workspace`.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.

    Raises:
        NotImplementedError: naming an argument that is not served yet.
        TypeError, ValueError: naming the argument, what was got and what is expected.  What one
            rank of the group raises before the ranks meet, all raise.
        RuntimeError: if another rank of the group failed, or made no such call in time.
        IndexError: on a CPU, for a target outside [0, V).  On a GPU, which is not synchronized,
            such a token's loss and the gradients that it takes part in are NaN.

    The formulas are in `cutefce.ops.primitives.interface`; the streaming form of the loss is that
    of "From Projection to Prediction: Beyond Logits for Scalable Language Models",
    arXiv 2511.17599.
    """
    report = report_errors.of(group, linear_weight)
    try:
        given = linear_bias is not None or weight is not None or options is not None
        if given or type(label_smoothing) not in (float, int) or label_smoothing:
            checks.refuse_unserved(
                linear_bias=linear_bias,
                weight=weight,
                label_smoothing=label_smoothing,
                options=options,
            )
        if workspace is not None:
            checks.workspace_bytes(workspace)
        if ignore_index is not None:
            checks.check_ignore_index(ignore_index)
        if denominator is not None:
            denominator = _as_tensor(denominator, input.device)
        call = localize(input, linear_weight, target, group, shards, sequence_parallel)
        # transforms see the derivatives of a function, not of an operator that it calls
        run = loss if torch_compat.is_transformed() else torch.ops.cutefce.loss
        result: Tensor = run(
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
    except Exception as error:
        # an error of the dispatcher names no argument; looking for it first would take time
        tensors = {"input": input, "linear_weight": linear_weight, "target": target}
        wrong = checks.type_error(
            **tensors, reduction=reduction, shards=shards, sequence_parallel=sequence_parallel
        )
        if report is not None:
            report.publish(wrong or error)
        if wrong is not None:
            raise wrong from None
        raise


def _as_tensor(denominator: Tensor | float, device: torch.device) -> Tensor:
    """Return a denominator as a tensor, a number's on `device`."""
    checks.check_type("denominator", denominator)
    if isinstance(denominator, Tensor):
        return replicated("denominator", denominator)
    if torch.compiler.is_compiling():  # a constant would be compiled for each value
        return torch.ones((), dtype=torch.float64, device=device) * denominator
    try:
        return torch.full((), float(denominator), dtype=torch.float64, device=device)
    except OverflowError:
        raise ValueError("denominator: got an integer beyond the range of a float") from None


def plan(
    input: Tensor,
    linear_weight: Tensor,
    *,
    reduction: str = "mean",
    workspace: int | str | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> Plan:
    """Return how `linear_cross_entropy` would run with these arguments; print it to read it.

    Args:
        input: (..., D) hidden states.  Set requires_grad on input, linear_weight or both, as for
            the call.
        linear_weight: (V, D).
        reduction: as for the call, and so are the other arguments.
        workspace: peak memory, as for the call.
        group: process group over which the vocabulary is sharded.
        shards: rows of every rank's weight.
        sequence_parallel: whether input holds this rank's share of the tokens.

    Returns:
        Strategy, window, columns aliased and kept, and predicted memory (bytes) and time (seconds).
    """
    wrong = checks.type_error(
        input=input,
        linear_weight=linear_weight,
        reduction=reduction,
        shards=shards,
        sequence_parallel=sequence_parallel,
    )
    if wrong is not None:
        raise wrong
    target = torch.empty(input.shape[:-1], dtype=torch.long, device=input.device)
    call = localize(input, linear_weight, target, group, shards, sequence_parallel)
    options = LossOptions(reduction)
    sharding = Sharding(call.group, call.shards, call.sequence_parallel)
    options.check()
    sharding.ranks()
    h, w = autocast(call.h, call.w)
    checks.check_tensors(h, w, call.y.new_empty(h.shape[:-1]))
    sharding.check(w)
    rows, budget = h.reshape(-1, h.shape[-1]), checks.workspace_bytes(workspace)
    copied = copied_item_bytes(call.h, rows), copied_item_bytes(call.w, w)
    step = StepOptions(budget, h.requires_grad, w.requires_grad, *copied)
    return plan_for(rows, w, step, options, sharding)


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the names of `torch.nn.LinearCrossEntropyLoss`.

    `linear.weight` (num_classes, in_features) is the head's parameter, as in torch's module, so
    state dicts can be exchanged; sharded by vocabulary, as a DTensor beside an input that is one,
    it selects the group that shares the loss.  The other arguments are those of
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
        """Make the head; the parameters are those of torch's module and `workspace`."""
        super().__init__()
        checks.check_type("reduction", reduction)
        if ignore_index is not None:
            checks.check_ignore_index(ignore_index)
        checks.check_reduction(reduction)
        checks.workspace_bytes(workspace)
        checks.refuse_unserved(
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
        checks.check_linear(self.linear)
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
