"""Tensor views of dW's memory that hold exponentials, as `planning.dw_aliasing` places them."""

from torch import Tensor

from cutefce.ops.planning.dw_aliasing import fits_in_tail


def aliased_views(dw: Tensor, tokens: int, window: int, columns: int) -> list[tuple[int, Tensor]]:
    """Return first column and buffer (N, W) of each window of the first `columns`, in dW (V, D)."""
    size, flat = tokens * window, dw.view(-1)
    firsts = range(0, columns, window)
    start = flat.numel() - len(firsts) * size
    views = flat[start:].view(len(firsts), tokens, window)
    return list(zip(firsts, views, strict=True))


def free_tail(dw: Tensor, rows: int, tokens: int, columns: int) -> Tensor | None:
    """Return a buffer (N, K) of `columns` after the first `rows` of dW, None if it does not fit."""
    vocab, hidden = dw.shape
    if not fits_in_tail(rows, tokens, hidden, vocab, columns):
        return None
    return dw.view(-1)[vocab * hidden - tokens * columns :].view(tokens, columns)
