"""Which rows and classes an index of logits selects, and which views keep classes together."""

import math
from typing import Any

import torch
from torch import Tensor


def select(index: Any, ndim: int, classes: int) -> tuple[tuple[Any, ...], range] | None:
    """Split an index of logits of `ndim` dimensions, the last of which are `classes`.

    Returns:
        An index of hidden states, whose last dimension it keeps, and the numbers of the classes;
        None for an index that selects more than rows and consecutive classes.
    """
    parts = index if isinstance(index, tuple) else (index,)
    used, ellipses = 0, 0
    for part in parts:
        if part is Ellipsis:
            ellipses += 1
        elif isinstance(part, Tensor):
            used += part.ndim if part.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(part, (slice, int)) and not isinstance(part, bool):
            used += 1
        elif part is not None:
            return None
    if used > ndim or ellipses > 1:
        return None
    if used < ndim and (not ellipses or parts[-1] is Ellipsis):
        return parts, range(classes)
    *rows, last = parts
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    if not all(bound is None or isinstance(bound, int) for bound in (last.start, last.stop)):
        return None
    chosen = range(classes)[last]
    return ((*rows, slice(None)), chosen) if chosen.start < chosen.stop else None


def row_sizes(shape: tuple[Any, ...], rows: int, classes: int) -> list[Any] | None:
    """Return the sizes of rows in a `shape` for a view of logits, as their method takes it.

    Returns:
        None for a shape that does not fit, or whose last dimension has not all `classes` of a row.
    """
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    *sizes, last = given or (None,)
    if not sizes or last not in (classes, -1) or (*sizes, last).count(-1) > 1:
        return None
    known = math.prod([size for size in sizes if size != -1])
    fits = rows == known if -1 not in sizes else known > 0 and rows % known == 0
    return sizes if fits else None
