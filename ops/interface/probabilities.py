"""Probabilities of all classes as the target, as of `torch.nn.functional.cross_entropy`."""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import checks, heads
from cutefce.ops.interface.arguments import LossCall, LossOptions
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


def of_rows(call: LossCall) -> LossCall:
    """Return a call of probabilities (..., V) as one of (N, V), with a loss for each token."""
    h, y, token = call.h, call.y, call.tensors.token_weights
    if token is not None:
        h = torch.where((token == 0)[:, None], 0, h)  # what they hold does not matter
    y = y.reshape(-1, y.shape[-1])
    return call._replace(h=h, y=y, options=call.options.per_token())


def reduced(losses: Tensor, call: LossCall) -> Tensor:
    """Return the loss of a call of probabilities, whose tokens have `losses` (N,)."""
    reduction, token = call.options.reduction, call.tensors.token_weights
    if reduction == "none":
        return losses.reshape(call.y.shape[:-1])
    if reduction == "sum":
        return losses.sum()
    if call.tensors.denominator is not None:
        return losses.sum() * inverse_of(call.tensors.denominator, losses.dtype)
    weights = torch.ones_like(losses) if token is None else token.to(losses.dtype)
    return losses.sum() * inverse_of_sum(weights, weights != 0, losses.dtype)


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


def check_probabilities(target: Tensor, h: Tensor, w: Tensor, arguments: dict[str, Any]) -> None:
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
