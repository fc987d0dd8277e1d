"""Probabilities of all classes as the target, as of `torch.nn.functional.cross_entropy`."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import checks, heads
from cutefce.ops.interface.arguments import LossOptions, StepOptions, TensorOptions
from cutefce.ops.interface.soft_targets import check_soft_targets
from cutefce.ops.operators import probabilities  # noqa: F401  (registers)
from cutefce.ops.operators.context import autocast, wanted_gradients
from cutefce.ops.rows.targets import inverse_of, inverse_of_sum

IGNORED = LossOptions().ignore_index
UNSERVED = {
    "gradient": "exact",
    "accumulate_into": None,
    "group": None,
    "shards": None,
    "sequence_parallel": False,
}
"""Arguments that losses of class indices have alone, with the values that are expected."""


def is_probabilities(target: Any) -> bool:
    """Whether a `target` is probabilities, not class indices."""
    return isinstance(target, Tensor) and target.is_floating_point()


def loss_of_probabilities(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    arguments: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the loss of probabilities (..., V), and log-sum-exps (...) without gradient.

    The arguments are those of `cutefce.ops.interface.call.loss`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    checks.check_transform("linear_cross_entropy")
    options = LossOptions.from_keywords(arguments)
    tensors = TensorOptions.from_keywords(arguments)
    h, w = autocast(input, linear_weight)
    if tensors.soft_targets:
        check_soft_targets(target, h, options, tensors, 1)
    _check(target, h, w, arguments)
    options.check()
    tensors.check(checks.Operands(h, w, h.shape[:-1], len(w)), options.reduction)
    tensors, rows = tensors.prepared(h), h.reshape(-1, h.shape[-1])
    token = tensors.token_weights
    if token is not None:
        token = token.reshape(-1)  # of one token, too
        tensors = dataclasses.replace(tensors, token_weights=token)
        rows = torch.where((token == 0)[:, None], 0, rows)  # what they hold does not matter
    wanted = wanted_gradients(h, w, tensors.linear_bias)
    step = StepOptions(checks.workspace_bytes(arguments.get("workspace")), *wanted)
    losses, lse = torch.ops.cutefce.losses_of_probabilities(
        rows, w, target.reshape(-1, len(w)), *step.pack(), *options.pack(), *tensors.pack()
    )
    if token is not None:
        lse = torch.where(token == 0, 0, lse)
    lse = lse.reshape(h.shape[:-1])
    if options.reduction == "none":
        return losses.reshape(h.shape[:-1]), lse
    if options.reduction == "sum":
        return losses.sum(), lse
    if tensors.denominator is not None:
        return losses.sum() * inverse_of(tensors.denominator, losses.dtype), lse
    weights = losses.new_ones(len(rows)) if token is None else token.to(losses.dtype)
    return losses.sum() * inverse_of_sum(weights, weights != 0, losses.dtype), lse


def _refuse(arguments: dict[str, Any]) -> None:
    """Raise NotImplementedError for what needs class indices."""
    for name, expected in UNSERVED.items():
        got = arguments.get(name, expected)
        if got is not expected and got != expected:
            shown = "one" if isinstance(got, Tensor) else repr(got)
            raise NotImplementedError(
                f"{name}: got {shown} with probabilities of all classes as the target, expected "
                f"{expected!r}; or pass class indices, or target_indices and target_probs"
            )
    ignore_index = arguments.get("ignore_index", IGNORED)
    if ignore_index >= 0:
        raise ValueError(
            f"ignore_index: got {ignore_index} with probabilities, which have none, "
            "expected None; a token whose token_weights are 0 is ignored"
        )


def _check(target: Tensor, h: Tensor, w: Tensor, arguments: dict[str, Any]) -> None:
    """Raise an error that names the argument unless target is (..., V) of h (..., D), w (V, D).

    `arguments` are those that are given by name.
    """
    heads.check_head(h, w, is_cast=True)
    checks.check_device("linear_weight", w, h)
    heads.check_plain("target", target, heads.SHARDED)
    tokens = tuple(h.shape[:-1])
    expected = *tokens, w.shape[0]
    message = (
        f"target: got dtype {target.dtype} of shape {tuple(target.shape)}, expected integers "
        f"(class indices) of shape {tokens}, or probabilities of shape {expected}"
    )
    if target.ndim < len(expected):  # more likely class indices of a wrong dtype
        raise TypeError(message)
    _refuse(arguments)
    if not checks.are_equal("target", target.shape, expected):
        raise ValueError(message)
    checks.check_dtype("target", target)
    if target.requires_grad:
        raise ValueError(
            "target: got probabilities that require grad, expected target.detach(): cutefce has no "
            "gradient of them"
        )
    checks.check_device("target", target, h)
