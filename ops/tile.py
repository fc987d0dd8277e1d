"""From a tile of logits to exponentials: the arithmetic after the product, in plain torch code.

On a GPU with Triton `torch.compile` makes one kernel of each function; elsewhere they run in
place, operation by operation.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SLACK = 32.0
"""Nats that a logit may lie above the reference before its tile takes another reference.
Sums stay below V·e³², so that neither they nor 1/T leave the range of bfloat16 and float32."""

PADDING = -1
"""The column number of a tile's columns beyond its vocabulary window."""


def exponentials_(
    logits: Tensor,
    columns: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None = None,
    references: Tensor | None = None,
    exps: Tensor | None = None,
) -> None:
    """Turn `logits` (R, C) into exponentials relative to `reference` (R,), 0 at the `target` (R,).

    `columns` (C,) are the vocabulary entries of the tile.  With `sums` and `references` (R,),
    a row whose largest logit lies far above its reference uses that one instead; they receive
    the row sums and what they are relative to.  `exps` (R, C) receives a copy of the result.
    """
    if references is not None:
        largest = logits.amax(1)
        reference = torch.where(largest - reference > SLACK, largest, reference)
        references.copy_(reference)
    logits.masked_fill_(target[:, None] == columns, -torch.inf).sub_(reference[:, None]).exp_()
    if sums is not None:
        sums.copy_(logits.sum(1))
    if exps is not None:
        exps.copy_(logits)


def padded_exponentials(logits: Tensor, columns: Tensor, *rest: Any) -> None:
    """`exponentials_` for a tile of which some columns are padding; leaves `logits` alone."""
    exponentials_(torch.where(columns == PADDING, -torch.inf, logits), columns, *rest)


def scale_tiles_(exps: Tensor, factor: Tensor) -> None:
    """Multiply each row of each tile of `exps` (N, tiles, C) by its `factor` (N, tiles)."""
    exps.mul_(factor[:, :, None])


@functools.cache
def can_fuse() -> bool:
    """Whether Triton can build kernels here; warn once if not."""
    from torch.utils._triton import has_triton

    if not has_triton():
        warnings.warn("cutefce: no Triton; the portable path runs unfused on the GPU", stacklevel=2)
        return False
    return True


@functools.cache
def fused(function: Callable[..., None]) -> Callable[..., Any]:
    """Return `function` as one kernel, for any number of rows."""
    return torch.compile(function, dynamic=True)
