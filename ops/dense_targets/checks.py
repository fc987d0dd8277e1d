"""Checks of probabilities of all classes as a target, made before anything is allocated."""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import checks
from cutefce.ops.interface.options import LossOptions


def is_probabilities(target: Any) -> bool:
    """Whether a `target` is probabilities, not class indices."""
    return isinstance(target, Tensor) and target.is_floating_point()


def check_dense_target(
    target: Tensor, h: Any, w: Any, options: LossOptions, parts: int, ranks: int
) -> None:
    """Raise an error that names the argument unless target is (..., V) with h (..., D), w (V, D).

    `parts` is the number of ranks whose h, one after another, have the tokens, and `ranks` of those
    that share the classes.
    """
    for name, x in (("input", h), ("linear_weight", w), ("target", target)):
        checks.check_layout(name, x)
    tokens = checks.token_shape(h, parts)
    checks.check_tensors(h, w, target.new_empty(tokens, dtype=torch.long), parts)
    expected = *tokens, w.shape[0]
    if target.ndim < len(expected) or not checks.are_equal("target", target.shape, expected):
        own = ", of this rank's classes" if ranks > 1 else ""
        wrong = TypeError if target.ndim < len(expected) else ValueError
        raise wrong(
            f"target: got dtype {target.dtype} of shape {tuple(target.shape)}, expected integers "
            f"(class indices) of shape {tokens}, or probabilities of shape {expected}{own}"
        )
    checks.check_dtype("target", target)
    if target.requires_grad:
        raise ValueError(
            "target: got probabilities that require grad, expected target.detach(): cutefce has no "
            "gradient of them"
        )
    if target.device != h.device:
        raise ValueError(f"target: got device {target.device}, expected that of input, {h.device}")
    if options.is_sampled:
        raise NotImplementedError(
            "target: got probabilities of all classes with gradient='sampled', expected class "
            "indices, or target_indices and target_probs"
        )
    if options.ignore_index >= 0:
        raise ValueError(
            f"ignore_index: got {options.ignore_index} with probabilities, which have none, "
            "expected None; a token whose token_weights are 0 is ignored"
        )
