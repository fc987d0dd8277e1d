"""The public call, with the names and defaults of torch's `linear_cross_entropy`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.interface import call, checks
from cutefce.ops.interface.positions import loss_of_positions
from cutefce.ops.interface.scalars import with_tensors
from cutefce.ops.interface.soft_targets import one_class
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.parallel.dtensor import localize, localize_options


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
def linear_cross_entropy(*arguments: Any, return_lse: bool, **options: Any) -> "LossOutput": ...


def linear_cross_entropy(  # type: ignore[misc]
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
    **removed: Any,
) -> "Tensor | LossOutput":
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
            speed; "min", "max", or None for 2.5 GiB.
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
        **removed: arguments of earlier versions, which are refused.

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
    given = removed  # refused with the types of options; a call without options pays for none
    if reduction != "mean":
        given["reduction"] = reduction
    if ignore_index is not None:
        given["ignore_index"] = ignore_index
    if denominator is not None:
        given["denominator"] = denominator
    if linear_bias is not None:
        given["linear_bias"] = linear_bias
    if weight is not None:
        given["weight"] = weight
    if accumulate_into is not None:
        given["accumulate_into"] = accumulate_into
    if grad_output is not None:
        given["grad_output"] = grad_output
    if token_weights is not None:
        given["token_weights"] = token_weights
    if softcap is not None:
        given["softcap"] = softcap
    if gradient != "exact":
        given["gradient"] = gradient
    if type(samples) is not int or samples != 256:
        given["samples"] = samples
    if type(label_smoothing) is not float or label_smoothing:
        given["label_smoothing"] = label_smoothing
    if type(z_loss) is not float or z_loss:
        given["z_loss"] = z_loss
    if type(logit_scale) is not float or logit_scale != 1:
        given["logit_scale"] = logit_scale
    if type(temperature) is not float or temperature != 1:
        given["temperature"] = temperature
    if target_indices is not None:
        given["target_indices"] = target_indices
    if target_probs is not None:
        given["target_probs"] = target_probs
    run: Callable[..., tuple[Tensor, Tensor | None]] = _loss
    if isinstance(linear_weight, Tensor) and linear_weight.ndim > 2:
        run = functools.partial(loss_of_positions, _loss)
    more = group, shards, sequence_parallel
    loss, lse = run(input, linear_weight, target, given, workspace, options, return_lse, *more)
    return LossOutput(loss, lse) if return_lse else loss


class LossOutput(NamedTuple):
    """The results of `linear_cross_entropy` with `return_lse`."""

    loss: Tensor
    """() or, with reduction "none", (...)"""
    lse: Tensor | None
    """(...) the log-sum-exp of each token's logits, without gradient; 0 if ignored."""


def _loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    given: dict[str, Any],
    workspace: int | str | None,
    options: Any,
    return_lse: bool,
    group: ProcessGroup | None,
    shards: Sequence[int] | None,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss of `linear_cross_entropy` of one dimension, and the lse if asked for.

    More than eight parameters: they are those of `linear_cross_entropy`, but for what is in `given`
    by name unless it has its default.
    """
    report = report_errors.of(group, linear_weight)
    try:
        checks.check_transform("linear_cross_entropy")
        checks.refuse_options(options)
        checks.check_type("return_lse", return_lse)
        if workspace is not None:
            checks.workspace_bytes(workspace)
        some = one_class(target, given)
        part = localize(input, linear_weight, some, group, shards, sequence_parallel)
        local = given
        if given:
            for name in given:
                checks.check_type(name, given[name])  # the dispatcher takes True for 1
            if "ignore_index" in given:
                checks.check_ignore_index(given["ignore_index"])
            local = localize_options(part, with_tensors(given, input))
        if part.group is not None or shards is not None or sequence_parallel is not False:
            local = local | {
                "group": part.group,
                "shards": part.shards,
                "sequence_parallel": part.sequence_parallel,
            }
        run: Any = call.loss_and_lse if return_lse else call.loss
        if call.needs_operator(part.h, part.w, part.y, is_plain=not local):
            run = torch.ops.cutefce.loss_and_lse if return_lse else torch.ops.cutefce.loss
        y = None if target is None else part.y
        result = run(part.h, part.w, y, workspace=workspace, **local)
        value, lse = result if return_lse else (result, None)
        if value.ndim:
            value = value.movedim(0, part.dim)
        return value, None if lse is None else lse.movedim(0, part.dim)
    except Exception as error:
        named = {"input": input, "linear_weight": linear_weight, **given}
        named |= {"workspace": workspace, "shards": shards}
        if target is not None:
            named["target"] = target
        raise_named(error, report, **named, sequence_parallel=sequence_parallel)


def raise_named(error: Exception, report: report_errors | None, **arguments: Any) -> NoReturn:
    """Raise the TypeError of the first argument that is not of its type, or `error`, on all ranks.

    An error of the dispatcher names no argument; looking for it before each call would take time.
    """
    wrong = checks.type_error(**arguments)
    if report is not None:
        report.publish(wrong or error)
    try:
        if wrong is not None:
            raise wrong from None
        raise error
    finally:
        del error, wrong  # in this frame they would be reference cycles, which hold the group
