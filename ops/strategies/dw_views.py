"""TODO."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
from cutefce.ops.planning.dw_aliasing import fits_in_tail


def aliased_views(
    dw: "Tensor", tokens: int, window: int, columns: int
) -> "list[tuple[int, Tensor]]":
    """Return first column and room (N, W) of each window of the first `columns` of dW (V, D)."""
    size, flat = tokens * window, dw.view(-1)
    firsts = range(0, columns, window)
    start = flat.numel() - len(firsts) * size
    rooms = flat[start:].view(len(firsts), tokens, window)
    return list(zip(firsts, rooms, strict=True))


def free_tail(dw: "Tensor", rows: int, tokens: int, columns: int) -> "Tensor | None":
    """Return room (N, K) for `columns` in what follows the first `rows` of dW, None if it lacks."""
    vocab, hidden = dw.shape
    if not fits_in_tail(rows, tokens, hidden, vocab, columns):
        return None
    return dw.view(-1)[vocab * hidden - tokens * columns :].view(tokens, columns)
