"""Checks of the classes of log-probabilities, made before anything is allocated."""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.interface.soft_targets import check_indices


def first_class(target: Tensor | None, indices: Any) -> Tensor:
    """Return `target` (...), or without it the first class of `indices` (..., K)."""
    if target is not None:
        return target
    if indices is None:
        raise TypeError("target: got None (NoneType), expected a tensor, or target_indices")
    if not isinstance(indices, Tensor) or not indices.ndim:
        got = f"shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else repr(indices)
        raise ValueError(f"target_indices: got {got}, expected a tensor of shape (..., K)")
    return indices.select(-1, 0) if indices.shape[-1] else indices.sum(-1)


def check_output_classes(
    target: Tensor | None, h: Any, options: LossOptions, tensors: TensorOptions, parts: int
) -> Tensor:
    """Raise an error that names the argument unless classes are given in place of `target`.

    Return one class of each token (...), for checks of shapes.  `parts` is the number of ranks
    whose h (..., D), one after another, have the tokens.
    """
    indices = tensors.target_indices
    if tensors.target_probs is not None:
        raise ValueError(
            "target_probs: got probabilities with log-probabilities, expected None: "
            "target_indices are the classes"
        )
    if target is not None:
        raise ValueError("target: got one beside target_indices, expected None beside it")
    one = first_class(None, indices)
    assert indices is not None
    check_indices(indices, h, parts)
    if "is_top1" in options.output_names:
        raise NotImplementedError(
            "outputs: got 'is_top1' with target_indices, which is about one target; expected "
            "'argmax'"
        )
    if options.is_sampled and h.dtype == torch.float16:
        raise NotImplementedError(
            "gradient: got 'sampled' with target_indices and float16, which lacks the range of "
            "their factors; expected 'exact'"
        )
    return one
