"""Losses of K dimensions: one head and one target of a token at every position."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface import checks
from cutefce.ops.interface.arguments import Sharding, check_tensors
from cutefce.ops.interface.probabilities import is_probabilities
from cutefce.ops.interface.soft_targets import one_class
from cutefce.ops.rows.targets import inverse_of_sum


def loss_of_positions(
    loss: Callable[..., Any],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return the loss and lse of all positions, from `loss` of one of them after another.

    Args:
        loss: `linear_cross_entropy` for one position; it returns a loss, or one with its lse.
        input: (N, D).
        linear_weight: (V, d_1, ..., d_K, D).
        target: (N, d_1, ..., d_K).
        given: options by name, of which `linear_bias` (V, d_1, ..., d_K), `token_weights` and
            `temperature` (N, d_1, ..., d_K) have a value for every position.
    """
    target = _checked_target(input, linear_weight, target, given)
    reduction, ignore_index = given.get("reduction", "mean"), given.get("ignore_index", -100)
    sizes = linear_weight.shape[1:-1]
    count = math.prod(sizes)
    each: dict[str, list[Any]] = {}
    for name, x in given.items():
        varies = isinstance(x, Tensor) and x.shape[1:] == sizes
        each[name] = list(x.flatten(1).unbind(1)) if varies else [x] * count
    factor = None
    if reduction == "mean" and "denominator" not in given:
        factor = _inverse_weight(target, ignore_index, given, sum_dtype(input.dtype))
        each["reduction"] = ["sum"] * count
    weights, targets = linear_weight.flatten(1, -2).unbind(1), target.flatten(1).unbind(1)
    results = [
        loss(input, weights[i], targets[i], **{name: values[i] for name, values in each.items()})
        for i in range(count)
    ]
    lse = None
    if isinstance(results[0], tuple):
        lse = torch.stack([lse for _, lse in results], -1).reshape(target.shape)
        results = [loss for loss, _ in results]
    losses = torch.stack(results, -1)
    if reduction == "none":
        return losses.reshape(target.shape), lse
    return losses.sum() if factor is None else losses.sum() * factor, lse


def _checked_target(
    input: Tensor, linear_weight: Tensor, target: Tensor | None, given: dict[str, Any]
) -> Tensor:
    """Return the target as int64; raise an error that names the argument unless all fit."""
    one_class(target, given)
    is_soft = target is None or "target_indices" in given or "target_probs" in given
    for name, is_given, got, expected in (
        ("target_indices", is_soft, "soft targets", "target"),
        ("target", is_probabilities(target), "probabilities", "class indices"),
        ("accumulate_into", given.get("accumulate_into") is not None, "a buffer", "None"),
    ):
        if is_given:
            raise NotImplementedError(
                f"{name}: got {got} with linear_weight of shape {tuple(linear_weight.shape)}, "
                f"expected {expected} with losses of K dimensions"
            )
    assert target is not None
    for name, x in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        checks.check_layout(name, x)
    sizes = linear_weight.shape[1:-1]
    if 0 in sizes:
        raise ValueError(
            f"linear_weight: got shape {tuple(linear_weight.shape)}, expected a position or more "
            "in (V, d_1, ..., d_K, D)"
        )
    sharding = Sharding.of(given)
    tokens = input.shape[:1].numel() * sharding.parts(input)
    if input.ndim != 2 or target.shape != (tokens, *sizes):
        raise ValueError(
            f"target: got shape {tuple(target.shape)} with input of shape {tuple(input.shape)}, "
            f"expected (N, {', '.join(map(str, sizes))}) with (N, D), to match linear_weight of "
            f"shape {tuple(linear_weight.shape)}; a linear_weight (V, D) has no more dimensions"
        )
    if not checks.has_integers(target):
        raise TypeError(f"target: got dtype {target.dtype}, expected integers (class indices)")
    of = checks.Operands(input, linear_weight, target.shape, sharding.vocab(linear_weight))
    check_tensors(given, of)
    return target.long()


def _inverse_weight(
    target: Tensor, ignore_index: int, given: dict[str, Any], dtype: torch.dtype
) -> Tensor:
    """Return () of `dtype` the factor of the losses of all targets in their mean."""
    active = target != ignore_index
    count = active.to(dtype)
    if "token_weights" in given:
        count = torch.where(active, given["token_weights"].to(dtype), 0)
        active = count != 0
    if "weight" in given:
        kappa = given["weight"].to(dtype)
        count = count * kappa[target.clamp(0, len(kappa) - 1)]
    return inverse_of_sum(count, active, dtype)
