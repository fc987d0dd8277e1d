"""The operators of `ops/library.py` without numbers: what a graph compiler must know of them."""

from typing import Any

from torch import Tensor

from cutefce.ops.parallel import consistency
from cutefce.ops.planning.dw_aliasing import rows_in_place
from cutefce.ops.primitives.rows import sum_dtype


def forward(h: Tensor, w: Tensor, y: Tensor, reduction: str, *_: Any) -> Tensor:
    """Of `forward`."""
    return h.new_empty(y.shape if reduction == "none" else (), dtype=sum_dtype(h.dtype))


def loss(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    reduction: str,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
    strategy: str,
    window: int,
    aliased: int,
    kept: int,
    chunk: int,
    denominator: Tensor | None = None,
    group: str | None = None,
    *_: Any,
) -> tuple[Tensor, ...]:
    """Of `loss_forward`."""
    tokens, chunked = y.shape[0], strategy == "gradients_in_forward"
    dtype, has_dw = sum_dtype(h.dtype), grad_weight if chunked else aliased > 0
    dx_rows, dw_rows = h.shape[0] if chunked and grad_hidden else 0, w.shape[0] if has_dw else 0
    dx_rest, dw_rest = (
        rows - rows_in_place(rows, narrow=dtype != h.dtype) if chunked else 0
        for rows in (dx_rows, dw_rows)
    )
    if group is not None:
        dx_rows, dx_rest = 0, -(-tokens // consistency.resolve(group).size()) if dx_rows else 0
    rest_dtype = dtype if chunked else h.dtype
    return (
        h.new_empty((tokens,) if reduction == "none" else (), dtype=dtype),
        h.new_empty((4, tokens), dtype=dtype),
        h.new_empty((0, 0) if chunked else (tokens, kept)),
        h.new_empty((dx_rows, h.shape[1])),
        w.new_empty((dw_rows, w.shape[1])),
        h.new_empty((dx_rest, h.shape[1]), dtype=rest_dtype),
        h.new_empty((dw_rest, h.shape[1]), dtype=rest_dtype),
    )


def gradients(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    stats: Tensor,
    exps: Tensor,
    dw: Tensor,
    reduction: str,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Of `loss_backward`."""
    return (
        h.new_empty((h.shape[0] if grad_hidden else 0, h.shape[1])),
        w.new_empty((w.shape[0] if grad_weight else 0, w.shape[1])),
    )


def scaled(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    dx: Tensor,
    dw: Tensor,
    dx_rest: Tensor,
    dw_rest: Tensor,
    group: str | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    """Of `scale_gradients`."""
    whole = dx if group is None or not dx_rest.shape[0] else h
    return h.new_empty(whole.shape), dw.new_empty(dw.shape)
