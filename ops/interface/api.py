"""The public call, with the names and defaults of torch's `linear_cross_entropy`."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.interface import call, checks
from cutefce.ops.interface.arguments import check_arguments
from cutefce.ops.interface.positions import loss_of_positions
from cutefce.ops.interface.probabilities import is_probabilities
from cutefce.ops.interface.public_function import runs
from cutefce.ops.interface.scalars import with_tensors
from cutefce.ops.interface.soft_targets import one_class
from cutefce.ops.parallel.dtensor import localize
from cutefce.ops.rows.statistics import RowStats


class LossOutput(NamedTuple):
    """The results of `linear_cross_entropy` with `return_lse`."""

    loss: Tensor
    """() or, with reduction "none", (...)"""
    lse: Tensor | None
    """(...) the log-sum-exp of each token's logits, without gradient; 0 if ignored."""


def refuse_chunking(options: Any) -> None:
    """Raise NotImplementedError for chunking options of torch that ask for something."""
    if options is not None and (not isinstance(options, (int, float, tuple, list)) or options):
        raise NotImplementedError(
            f"options: got {checks.shown(options)}, expected None: `workspace` bounds the memory"
        )


def _loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    **given: Any,
) -> Tensor | LossOutput:
    """Return what `linear_cross_entropy` returns; `given` are its other arguments."""
    checks.check_transform("linear_cross_entropy")
    check_arguments(given)
    refuse_chunking(given.pop("options", None))
    return_lse = given.pop("return_lse", False)
    if isinstance(linear_weight, Tensor) and linear_weight.ndim > 2:
        each = functools.partial(linear_cross_entropy, return_lse=return_lse)
        value, lse = loss_of_positions(each, input, linear_weight, target, given)
        return value if lse is None else LossOutput(value, lse)
    part = localize(input, linear_weight, one_class(target, given), given)
    local = with_tensors(part.options, part.h)
    operands = part.h, part.w, None if target is None else part.y
    is_seen = local.keys() - {"workspace"} or call.needs_operator(part.h, part.w, part.y)
    calls: Any = torch.ops.cutefce if is_seen else call
    stats = None
    if return_lse:
        result, stats = calls.loss_and_stats(*operands, **local)
    else:
        result = calls.loss(*operands, **local)
    loss: Tensor = result.movedim(0, part.dim) if result.ndim else result
    if stats is None:
        return loss
    lse = torch.where(call.is_active(stats), RowStats(stats).lse, 0)
    shape = part.y.shape[:-1] if is_probabilities(part.y) else part.y.shape
    return LossOutput(loss, lse.reshape(shape).movedim(0, part.dim))


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    target_indices: Tensor | None = None,
    target_probs: Tensor | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    return_lse: Literal[False] = False,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    denominator: Tensor | float | None = None,
    accumulate_into: Tensor | None = None,
    grad_output: Tensor | float | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> Tensor: ...


@overload
def linear_cross_entropy(*arguments: Any, return_lse: bool, **options: Any) -> LossOutput: ...


@runs(_loss)  # type: ignore[misc]
def linear_cross_entropy(  # type: ignore[empty-body]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    target_indices: Tensor | None = None,
    target_probs: Tensor | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    return_lse: bool = False,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    denominator: Tensor | float | None = None,
    accumulate_into: Tensor | None = None,
    grad_output: Tensor | float | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> Tensor | LossOutput:
    """Cross entropy of softmax(input @ linear_weight.T) against target, without the logits.

    The parameters are those of `torch.nn.functional.linear_cross_entropy`, what models and trainers
    do to logits and losses, a `workspace`, a `denominator`, and a `group` of ranks over which the
    vocabulary is sharded.  A `linear_weight` that is a DTensor with placement Shard(0) selects its
    group itself beside an `input` that is a DTensor, and needs `group` beside a plain one.  An
    `input` with Shard(dim of tokens) selects `sequence_parallel`; gradients have the placements of
    their tensors.

    The logits are softcap(logit_scale * input @ linear_weight.T + linear_bias) / temperature.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device, or float32 beside a 16-bit input; or
            (V, d_1, ..., d_K, D) for a loss of K dimensions, with input (N, D) and target
            (N, d_1, ..., d_K).
        target: (...) integer class indices in [0, V), or `ignore_index`; or (..., V) floating-point
            probabilities q of all classes: Σ_v q_v (lse - u_v), as in torch.  None with soft ones.
        linear_bias: (V,) or (V, d_1, ..., d_K) floating-point, added to the logits before the
            softcap.
        target_indices: (..., K) integer classes of each token, K from 1 to 256, with `target_probs`
            in the place of target: soft targets.
        target_probs: (..., K) floating-point probabilities q >= 0 of these classes; others have 0.
            The loss is Σ_k q_k (lse - u_k): they need not add up to 1, and those of a class that
            occurs twice add up.  A class with probability 0 may be any integer, and a token whose
            probabilities are all 0 is ignored.
        weight: (V,) factor of each class's losses.
        reduction: "mean" over the targets that are not ignored (0 if all are), each counting as
            its weight, soft ones as their token's; "sum" or "none".
        ignore_index: tokens with this target have loss 0 and gradient 0; None is -100.
        label_smoothing: ε from 0 to 1, part of the target's probability that all classes share.
        options: torch's chunking options; not served, use `workspace`.
        token_weights: (...) factor of each token's loss.  A token with 0 is ignored.
        z_loss: λ >= 0: λ lse² is added to the loss of a token, before its weights.
        logit_scale: factor of the products of input and linear_weight; not 0.
        softcap: bound c > 0 of the logits, c tanh(x / c); not with label_smoothing.
        temperature: divisor of the logits after the softcap, > 0; a number, or () or (...).
        gradient: "exact", or "sampled": unbiased estimates of the gradients, from few entries of
            the softmax of each token, drawn with torch's generator of the device.  The loss, and
            all that is returned, is that of "exact", but for rounding.
        samples: expected number of entries of a token, at most, from 16 to 4096, with "sampled":
            the error is about 1 / sqrt(samples).
        return_lse: whether to return a `LossOutput` of the loss and the log-sum-exps.
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may use for
            speed; "min", "max", or None for 2.25 GiB.
        denominator: divisor of "mean", a number or a tensor () or (1,), so that microbatches, or
            ranks with different tokens, add up to the mean of one large batch.  With 0 the loss
            is 0.
        accumulate_into: (V, D) contiguous buffer to which the backward adds the gradient of
            linear_weight, in the dtype of sums (float32, or float64) or that of the products; the
            weight itself then gets none.  Of a rank's own rows, with `group`.
        grad_output: the gradient that the backward of this loss will get, a number or a tensor ()
            or (1,), such as a loss scale over the number of microbatches.  A forward may then add
            to `accumulate_into`, in less memory and time; with another gradient the backward raises
            RuntimeError on a CPU, and elsewhere makes input's gradient and the buffer's first row
            NaN.  Not with reduction "none"; no effect under hooks of saved tensors.
        group: process group whose ranks hold consecutive parts (V_k, D) of the weight, in rank
            order, and of the bias.  Class indices are global; they and all other arguments, weight
            (V,) of all classes too, are the same on every rank, and so are the loss and the
            gradient of input.
        shards: V_k of every rank; None if they are equal.
        sequence_parallel: input holds this rank's equal share of the first dimension, in rank
            order, and so does its gradient.  Targets, and losses with "none", are those of all
            tokens.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.  With `return_lse`, a
        `LossOutput`.

    Raises:
        NotImplementedError: naming an argument, or two together, that are not served.
        TypeError, ValueError: naming the argument, what was got and what is expected.  What one
            rank of the group raises before the ranks meet, all raise.
        RuntimeError: if another rank of the group failed, or made no such call in time.
        IndexError: on a CPU, for a target outside [0, V); ValueError for a bad probability.  On a
            GPU, which is not synchronized, such a token's loss and the gradients that it takes
            part in are NaN.

    The formulas are in `cutefce.ops.primitives.portable_projection`; the streaming form of the
    loss is that of "From Projection to Prediction: Beyond Logits for Scalable Language Models",
    arXiv 2511.17599.
    """
