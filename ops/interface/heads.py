"""Errors of hidden states, weights and targets that do not fit together."""

import torch
from torch import Tensor

from cutefce.ops import torch_compat
from cutefce.ops.interface import checks
from cutefce.ops.operators.context import PLAIN_TYPES, is_mixed

SHARDED = (
    "call cutefce.linear_cross_entropy with a linear_weight that is sharded over the vocabulary"
)
"""What else than a plain tensor is served."""


def check_tensors(h: Tensor, w: Tensor, y: Tensor, parts: int = 1) -> None:
    """Raise TypeError or ValueError unless h (..., D), w (V, D) and y (...) fit together.

    `parts` is the number of ranks whose h, one after another, have the tokens of y.
    """
    check_head(h, w)
    check_plain("target", y, SHARDED)
    if not checks.has_integers(y):
        raise TypeError(f"target: got dtype {y.dtype}, expected integers (class indices)")
    if parts > 1 and h.ndim == 1:
        raise ValueError(f"input: got shape {tuple(h.shape)}, expected a dimension of tokens first")
    tokens = token_shape(h, parts)
    checks.check_device("linear_weight", w, h)
    shared = f", of which {parts} ranks hold a part each" if parts > 1 else ""
    check_targets(y, tokens, h, "input", shared)


def check_targets(y: Tensor, tokens: tuple[int, ...], h: Tensor, of: str, more: str = "") -> None:
    """Raise ValueError unless y has the shape of the tokens, and the device of h (..., D).

    h is the argument `of`; `more` is said of its shape.
    """
    if not checks.are_equal("target", y.shape, tokens):
        raise ValueError(
            f"target: got shape {tuple(y.shape)}, expected {tuple(tokens)} "
            f"to match {of} of shape {tuple(h.shape)}{more}"
        )
    checks.check_device("target", y, h, of)


def check_head(
    h: Tensor,
    w: Tensor,
    names: tuple[str, str] = ("input", "linear_weight"),
    hint: str = SHARDED,
    is_cast: bool = False,
) -> None:
    """Raise TypeError or ValueError unless h (..., D) and w (V, D), called `names`, fit together.

    `hint` says what to do with a DTensor, `is_cast` whether a float32 weight is cast to 16 bits.
    """
    of_h, of_w = names
    check_plain(of_h, h, hint)
    check_plain(of_w, w, hint)
    checks.check_dtype(of_h, h)
    if w.dtype != h.dtype and not (is_cast and is_mixed(h, w)):
        is_known = w.dtype in checks.DTYPES
        remedy = "cast one of them, or call under torch.autocast"
        raise TypeError(
            f"{of_w}: got dtype {w.dtype}, expected that of {of_h}, {h.dtype}; "
            f"{remedy if is_known else 'dequantize a quantized weight'}"
        )
    check_shapes(h, w, names)


def check_shapes(h: Tensor, w: Tensor, names: tuple[str, str] = ("input", "linear_weight")) -> None:
    """Raise ValueError unless the shapes of h (..., D) and w (V, D), called `names`, fit together.

    Of DTensors they are those of all ranks.
    """
    of_h, of_w = names
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"{of_w}: got shape {tuple(w.shape)}, expected (V, D) with V >= 1 and D >= 1; "
            "gather it first if it is a sharded parameter"
        )
    if h.ndim == 0 or not checks.are_equal(of_h, h.shape[-1:], w.shape[1:]):
        if h.ndim > 0 and h.shape[-1] == w.shape[0]:
            raise ValueError(
                f"{of_w}: got shape {tuple(w.shape)}, expected (V, {h.shape[-1]}) to match "
                f"{of_h} of shape {tuple(h.shape)}; pass {of_w}.t(), or hidden states, not logits"
            )
        raise ValueError(
            f"{of_h}: got shape {tuple(h.shape)}, expected (..., {w.shape[1]}) "
            f"to match {of_w} of shape {tuple(w.shape)}"
        )


def check_plain(name: str, x: Tensor, hint: str) -> None:
    """Raise TypeError unless a tensor is a plain, strided one; `hint` is about DTensors."""
    if type(x) in PLAIN_TYPES and x.layout is torch.strided and not x.is_nested:
        return  # without further calls, which take CPU time
    if torch_compat.is_dtensor(x):
        raise TypeError(
            f"{name}: got a DTensor with placements {x.placements}, expected a plain tensor; "
            f"pass {name}.full_tensor(), or {hint.format(name)}"
        )
    checks.check_layout(name, x)


def token_shape(h: Tensor, parts: int) -> tuple[int, ...]:
    """Return the shape (...) of all tokens; `parts` ranks have h (..., D), one after another."""
    return (parts * h.shape[0], *h.shape[1:-1]) if h.ndim > 1 else ()
