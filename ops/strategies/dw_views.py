"""Tensor views of dW's memory that hold exponentials, as `planning.dw_aliasing` places them."""

from torch import Tensor

from cutefce.ops.planning.dw_aliasing import DwMemory


def memory_of(dw: Tensor, tokens: int, block: int) -> DwMemory:
    """Return dW (V, D) as room for exponentials of `tokens`, in windows of whole blocks."""
    vocab, hidden = dw.shape
    return DwMemory(tokens, hidden, vocab, block)


def aliased_views(dw: Tensor, memory: DwMemory, columns: int) -> list[tuple[int, Tensor]]:
    """Return first column and buffer (N, W) of each window of the first `columns`, in dW (V, D)."""
    flat, tokens = dw.view(-1), memory.tokens
    return [
        (first, flat[start : start + tokens * width].view(tokens, width))
        for first, start, width in memory.aliased_windows(columns)
    ]


def free_tail(dw: Tensor, rows: int, tokens: int, columns: int) -> Tensor | None:
    """Return a buffer (N, K) of `columns` after the first `rows` of dW, None if it does not fit."""
    start = memory_of(dw, tokens, 1).tail(rows, columns)
    return None if start is None else dw.view(-1)[start:].view(tokens, columns)
