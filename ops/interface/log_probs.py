"""Log-probabilities of tokens and other values of their distributions, without the logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.interface import checks, heads
from cutefce.ops.interface.arguments import (
    OF_TARGET,
    OUTPUTS,
    Sharding,
    check_arguments,
    check_outputs,
)
from cutefce.ops.interface.call import is_active
from cutefce.ops.interface.kept_classes import kept_indices, kept_values
from cutefce.ops.interface.public_function import runs
from cutefce.ops.interface.scalars import with_tensors
from cutefce.ops.interface.soft_targets import one_class
from cutefce.ops.outputs.reductions import stat_rows
from cutefce.ops.outputs.top_classes import ABSENT_CLASS
from cutefce.ops.parallel.dtensor import localize


class LogProbs(NamedTuple):
    """Values of each token, of target's shape, 0 for ignored ones; None if not asked for."""

    log_probs: Tensor
    """log p_y, the log-probability of the target; (..., K) of the classes `target_indices`.

    None in calls without a target, which its type leaves out for all others."""
    lse: Tensor | None
    """log Σ_v exp(u_v) of the logits u."""
    entropy: Tensor | None
    """-Σ_v p_v log p_v, in nats."""
    sum_p_squared: Tensor | None
    """Σ_v p_v²"""
    mean_logit: Tensor | None
    """Σ_v u_v / V"""
    is_top1: Tensor | None
    """bool: no other logit is above the target's."""
    argmax: Tensor | None
    """int64: the class of the largest logit; the target if `is_top1`."""
    rank: Tensor | None
    """int64: how many logits are above the target's; 0 if `is_top1`."""
    top_log_probs: Tensor | None = None
    """(..., k) the largest log-probabilities, in descending order; -inf where there is none."""
    top_classes: Tensor | None = None
    """(..., k) int64: their classes; -100 where there is none, and of ignored tokens."""


def _log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    **given: Any,
) -> LogProbs:
    """Return what `linear_log_probs` returns; `given` are its other arguments."""
    checks.check_transform("linear_log_probs")
    check_arguments(given)
    outputs, workspace = given.pop("outputs", ()), given.pop("workspace", None)
    check_outputs(outputs)
    numbers = [name for name in ("argmax", "rank") if name in outputs]
    if numbers or "top_k" in given or "kept_classes" in given:
        # which are compared with the number of classes, before the call checks its tensors
        heads.check_shapes(input, linear_weight)
        _check_numbers(numbers, given, Sharding.of(given).vocab(linear_weight))
    if "logit_floor" in given and "mean_logit" in outputs:
        raise NotImplementedError(
            "logit_floor: got one with 'mean_logit' in outputs, expected one of them"
        )
    if "kept_classes" in given:
        return _of_kept_classes(input, linear_weight, target, workspace, outputs, given)
    is_asked = len(outputs) > 0 or "top_k" in given
    has_target = target is not None or "target_indices" in given or not is_asked
    if not has_target:
        target = _any_target(input, outputs, given)
    call = localize(input, linear_weight, one_class(target, given, ", or `outputs` alone"), given)
    names = [name for name in OUTPUTS if name in outputs]
    own, lse, entropy, stats = torch.ops.cutefce.loss_and_stats(
        call.h,
        call.w,
        None if target is None else call.y,
        outputs=",".join(names) or "lse",
        workspace=workspace,
        **with_tensors(call.options, call.h),
    )

    def whole(rows: Tensor, *more: int) -> Tensor:
        """Return values of tokens (N, ...) as (..., *more)."""
        return rows.reshape((*call.y.shape, *more)).movedim(0, call.dim)

    active = is_active(stats)
    rows = {name: torch.where(active, stats[row], 0) for name, row in stat_rows(names).items()}
    rows |= {"lse": lse, "entropy": entropy}  # those that have gradients
    found = {name: whole(rows[name]) for name in names}
    if "is_top1" in found:
        found["is_top1"] = found["is_top1"].bool()
    for name in numbers:
        found[name] = found[name].long()
    others = (found.get(name) for name in OUTPUTS)
    classes = call.options["target_indices"].shape[-1:] if target is None else ()
    log_probs: Any = whole(own, *classes) if has_target else None
    values, k = LogProbs(log_probs, *others), given.get("top_k", 0)
    if not k:
        return values
    top_log_probs = torch.where(active, stats[-2 * k : -k], -torch.inf)
    top_classes = torch.where(active, stats[-k:], ABSENT_CLASS).long()
    top = whole(top_log_probs.t(), k), whole(top_classes.t(), k)
    return values._replace(top_log_probs=top[0], top_classes=top[1])


def _check_numbers(outputs: Sequence[str], given: dict[str, Any], classes: int) -> None:
    """Raise ValueError unless `outputs` and `top_k` can be numbers of so many classes."""
    top_k = given.get("top_k", 0)
    if (outputs or top_k) and classes > 1 << 24:  # a class is a float32
        got = f"outputs: got {outputs[0]!r}" if outputs else f"top_k: got {top_k}"
        raise ValueError(f"{got} with {classes} classes, expected at most 2^24")
    if top_k > classes:
        raise ValueError(f"top_k: got {top_k} with {classes} classes, expected at most {classes}")


def _of_kept_classes(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    workspace: int | str | None,
    outputs: Sequence[str],
    given: dict[str, Any],
) -> LogProbs:
    """Return the values under a softmax over kept classes, from the log-probabilities of these."""
    if "mean_logit" in outputs:
        raise NotImplementedError(
            "kept_classes: got some with 'mean_logit' in outputs, expected one of them"
        )
    if "top_k" in given:
        raise NotImplementedError(
            f"top_k: got {given['top_k']} with kept_classes, expected 0, or no kept_classes"
        )
    vocab = Sharding.of(given).vocab(linear_weight)
    indices = kept_indices(target, given, vocab)
    more = {"target_indices": indices, "outputs": ("lse",), "workspace": workspace}
    every = _log_probs(input, linear_weight, None, **given, **more)
    assert every.lse is not None
    found = kept_values(every.log_probs, every.lse, indices)
    others = (found[name] if name in outputs else None for name in OUTPUTS)
    return LogProbs(found["log_probs"], *others)


def _any_target(input: Tensor, outputs: Sequence[str], given: dict[str, Any]) -> Tensor:
    """Return a target (...) for calls of `outputs` that do not depend on it: class 0.

    Raises:
        ValueError: naming the argument that needs a target.
    """
    for name in outputs:
        if name in OF_TARGET:
            expected = tuple(name for name in OUTPUTS if name not in OF_TARGET)
            raise ValueError(f"outputs: got {name!r} without a target, expected some of {expected}")
    if "logit_floor" in given:
        raise ValueError("logit_floor: got one without a target, expected None")
    if "ignore_index" in given:
        raise ValueError(
            f"ignore_index: got {given['ignore_index']} without a target, expected None: all "
            "tokens count"
        )
    shape = heads.token_shape(input, Sharding.of(given).parts(input))
    return torch.zeros(shape, dtype=torch.long, device=input.device)


@runs(_log_probs)
def linear_log_probs(  # type: ignore[empty-body]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    target_indices: Tensor | None = None,
    outputs: Sequence[str] = (),
    top_k: int = 0,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    logit_floor: Tensor | None = None,
    kept_classes: Tensor | None = None,
    ignore_index: int | None = None,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    accumulate_into: Tensor | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
) -> LogProbs:
    """Log-probabilities of classes under softmax of the logits, without the logits, from one pass.

    The logits are softcap(logit_scale * input @ linear_weight.T + linear_bias) / temperature.

    Args:
        input: (..., D) hidden states, bfloat16, float16, float32 or float64.
        linear_weight: (V, D), of input's dtype and device.
        target: (...) integer class indices in [0, V), or `ignore_index`; None with
            `target_indices`, and in calls that ask for no value of a target.
        target_indices: (..., K) integer classes of each token in the place of target, K from 1 to
            256: log p of each, with gradients for each.  Those equal to `ignore_index` have the
            value 0 and gradients 0; a token that has only such ones is ignored.  Not with
            "is_top1".
        outputs: what is returned beside the log-probabilities: some of "lse", "entropy",
            "sum_p_squared", "mean_logit", "is_top1", "argmax" and "rank".  Without a target they
            are all that is returned; "is_top1" and "rank" need one.
        top_k: how many of the largest log-probabilities and their classes are returned, from 0 to
            32, without gradients.  Not with `kept_classes`.
        linear_bias: as for `linear_cross_entropy`, and so are the other parameters.
        logit_scale: factor of the products of input and linear_weight.
        softcap: bound of the logits; not with "mean_logit".
        temperature: divisor of the logits, a number, or () or (...).
        logit_floor: (...) of truncated sampling: classes whose logit, after softcap and
            temperature, is below that of their token take no part in the softmax, as if it were
            -inf, and get no gradient.  A target always takes part.  Not with `target_indices` and
            "mean_logit".
        kept_classes: (..., K) integer classes of truncated sampling, K from 1 to 255, -1 where a
            token has fewer: the softmax is over these and the target alone.  A class may occur
            twice.  Not with `target_indices`, `logit_floor` and "mean_logit".
        ignore_index: tokens with this target have values 0 and gradients 0; None is -100.
        gradient: "exact" or "sampled"; with "sampled", entropy has no gradient.
        samples: expected number of entries of a token, at most, with sampled gradients.
        workspace: peak memory in bytes, "min", "max" or None.
        accumulate_into: (V, D) buffer to which the backward adds the gradient of linear_weight.
        group: process group over which the vocabulary is sharded.
        shards: rows of every rank's weight.
        sequence_parallel: whether input holds this rank's share of the tokens.

    More than eight parameters: they are options of `linear_cross_entropy`.

    Returns:
        The log-probabilities, None without a target, and the outputs.  Log-probabilities, lse and
        entropy have gradients by input, linear_weight and linear_bias; entropy has none with
        softcap or with sampled gradients, for which the backward raises NotImplementedError.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`.
    """
