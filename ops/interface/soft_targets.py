"""Checks of soft targets and of classes of outputs, made before anything is allocated."""

from typing import Any

from torch import Tensor

from cutefce.ops.interface import checks, heads
from cutefce.ops.interface.arguments import OF_TARGET, LossOptions, TensorOptions
from cutefce.ops.rows.targets import OUTPUTS

MAX_CLASSES = 256
"""The most classes of a token."""


def one_class(target: Tensor | None, given: dict[str, Any], others: str = "") -> Tensor:
    """Return `target` (...), or without it one class of each token, of the arguments by name.

    `others` says what the caller takes beside.
    """
    if target is not None:
        return target
    if "target_indices" not in given and "target_probs" not in given:
        expected = f"a tensor, or target_indices{others}"
        raise TypeError(f"target: got None (NoneType), expected {expected}")
    indices = given.get("target_indices")
    if not isinstance(indices, Tensor) or not indices.ndim:
        got = f"shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else repr(indices)
        expected = "a tensor of shape (..., K); probabilities of all classes are a `target`"
        raise ValueError(f"target_indices: got {got}, expected {expected}")
    return indices.select(-1, 0) if indices.shape[-1] else indices.sum(-1)


def check_soft_targets(
    target: Tensor | None, h: Any, options: LossOptions, tensors: TensorOptions, parts: int
) -> Tensor:
    """Raise an error that names the argument unless classes are given in place of `target`.

    Those of a loss have probabilities, those of outputs none.  Return one class of each token
    (...), for checks of shapes.  `parts` is the number of ranks whose h (..., D), one after
    another, have the tokens.
    """
    indices, probs = tensors.target_indices, tensors.target_probs
    of_outputs = options.reduction == OUTPUTS
    if of_outputs and probs is not None:
        raise ValueError(
            "target_probs: got probabilities with log-probabilities, expected None: "
            "target_indices are the classes"
        )
    if target is not None:
        raise ValueError("target: got one beside target_indices, expected None beside it")
    one = one_class(None, tensors.soft_targets)
    for name, x in (("target_indices", indices), ("target_probs", probs)):
        if x is not None:
            checks.check_layout(name, x)
            checks.check_device(name, x, h)
        elif not of_outputs:
            other = "target_probs" if name == "target_indices" else "target_indices"
            raise ValueError(f"{name}: got None beside {other}, expected a tensor of its shape")
    assert indices is not None
    _check_indices(indices, h, parts)
    if probs is None:
        _check_outputs(options, tensors)
    else:
        _check_probs(probs, indices, options)
    return one


def _check_outputs(options: LossOptions, tensors: TensorOptions) -> None:
    """Raise NotImplementedError for what outputs of several classes do not have."""
    for name in options.output_names:
        if name in OF_TARGET:
            raise NotImplementedError(
                f"outputs: got {name!r} with target_indices, which is about one target; "
                "expected 'argmax'"
            )


def _check_probs(probs: Tensor, indices: Tensor, options: LossOptions) -> None:
    """Raise an error unless probabilities are constants of the classes `indices` (..., K)."""
    checks.check_dtype("target_probs", probs)
    checks.check_constant("target_probs", probs)
    if not checks.are_equal("target_probs", probs.shape, indices.shape):
        raise ValueError(
            f"target_probs: got shape {tuple(probs.shape)}, expected that of target_indices, "
            f"{tuple(indices.shape)}"
        )
    if options.ignore_index != LossOptions().ignore_index:
        raise ValueError(
            f"ignore_index: got {options.ignore_index} with target_indices, expected None: a "
            "token whose probabilities are all 0 is ignored"
        )


def _check_indices(indices: Tensor, h: Any, parts: int) -> None:
    """Raise an error unless `target_indices` are up to `MAX_CLASSES` integers of each token."""
    if not checks.has_integers(indices):
        raise TypeError(f"target_indices: got dtype {indices.dtype}, expected integers")
    tokens = heads.token_shape(h, parts)
    fits = indices.ndim == len(tokens) + 1
    if not fits or not checks.are_equal("target_indices", indices.shape[:-1], tokens):
        raise ValueError(
            f"target_indices: got shape {tuple(indices.shape)}, expected "
            f"({''.join(f'{size}, ' for size in tokens)}K) to match input of shape "
            f"{tuple(h.shape)}"
        )
    if not 1 <= indices.shape[-1] <= MAX_CLASSES:
        raise ValueError(
            f"target_indices: got {indices.shape[-1]} classes a token, expected 1 to {MAX_CLASSES}"
        )
