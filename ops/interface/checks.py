"""All errors that a user can cause, raised before anything is allocated."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cutefce.cute_kernels.problem import ITEM_BYTES

DTYPES = {getattr(torch, name) for name in ITEM_BYTES}
REDUCTIONS = ("mean", "sum", "none")


def check_call(h: Tensor, w: Tensor, y: Tensor, reduction: str, parts: int = 1) -> None:
    """Raise TypeError or ValueError that names the argument, what was got and what is expected.

    `parts` is how many such h, one after the other, have the tokens of y.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, expected one of {REDUCTIONS}")
    for name, x in (("h", h), ("w", w), ("y", y)):
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name}: got a DTensor with placements {x.placements}, expected a plain tensor; "
                f"pass {name}.full_tensor(), or call cutefce.linear_cross_entropy with w sharded "
                "over the vocabulary"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name}: got layout {x.layout}, expected {torch.strided}")
    _check_dtypes(h, w, y)
    _check_shapes(h, w, y, parts)
    for name, x in (("w", w), ("y", y)):
        if x.device != h.device:
            raise ValueError(f"{name}: got device {x.device}, expected that of h, {h.device}")


def _check_dtypes(h: Tensor, w: Tensor, y: Tensor) -> None:
    if h.dtype not in DTYPES:
        raise TypeError(f"h: got dtype {h.dtype}, expected one of {', '.join(ITEM_BYTES)}")
    if w.dtype != h.dtype:
        raise TypeError(
            f"w: got dtype {w.dtype}, expected that of h, {h.dtype}; "
            "cast one of them, or call under torch.autocast"
        )
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise TypeError(f"y: got dtype {y.dtype}, expected integers (class indices)")


def check_denominator(denominator: Tensor | None, h: Tensor, reduction: str) -> None:
    """Raise TypeError or ValueError unless it is a number that "mean" can divide by."""
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f'denominator: got one with reduction={reduction!r}, expected "mean"')
    if denominator.shape != () or denominator.device != h.device:
        raise ValueError(
            f"denominator: got shape {tuple(denominator.shape)} on {denominator.device}, "
            f"expected () on h's device, {h.device}"
        )


def _check_shapes(h: Tensor, w: Tensor, y: Tensor, parts: int) -> None:
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"w: got shape {tuple(w.shape)}, expected (V, D) with V >= 1 and D >= 1; "
            "a sharded parameter must be gathered first"
        )
    if h.ndim == 0 or h.shape[-1] != w.shape[1]:
        raise ValueError(
            f"h: got shape {tuple(h.shape)}, expected (..., {w.shape[1]}) "
            f"to match w of shape {tuple(w.shape)}"
        )
    tokens: tuple[int, ...] = h.shape[:-1]
    if parts > 1:
        if h.ndim == 1:
            raise ValueError(f"h: got shape {tuple(h.shape)}, expected a dimension of tokens first")
        tokens = parts * tokens[0], *tokens[1:]
    if y.shape != tokens:
        shared = f", of which {parts} ranks hold a part each" if parts > 1 else ""
        raise ValueError(
            f"y: got shape {tuple(y.shape)}, expected {tuple(tokens)} "
            f"to match h of shape {tuple(h.shape)}{shared}"
        )
