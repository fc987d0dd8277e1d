"""Selects the tokens that a call computes, gathers their rows, and puts results back.

Kernels select on the device.  Others select where the plan says so.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.kernel_set import KernelSet
from cutefce.cute_kernels.spec.rowwise import MoveRowsSpec, SelectRowsSpec
from cutefce.cute_kernels.workspace import Move
from cutefce.ops.rows.selection import CountedRows, RowSelection


def select_on_device(arch: str, y: Tensor, ignored: int, chunk: int) -> RowSelection:
    """Return the selection of the targets y (N,) that are not `ignored`, in chunks of tokens."""
    tokens = y.shape[0]
    order, targets = torch.empty_like(y), torch.empty_like(y)
    counts = y.new_empty(ceil_div(tokens, chunk), dtype=torch.int32)
    compiled(SelectRowsSpec(arch))(y, order, targets, counts, chunk, ignored)
    return RowSelection(order, targets, counts, chunk, tokens, arch)


def select_on_host(y: Tensor, counted: Tensor, ignored: int) -> RowSelection | None:
    """Return the selection of the targets y (N,) where `counted` (N,) are not `ignored`.

    None if all are.  A GPU is waited for.
    """
    order, tokens = (counted != ignored).nonzero()[:, 0], len(y)
    if len(order) == tokens:
        return None
    return RowSelection(order, y.index_select(0, order), None, tokens, tokens)


def row_count(selection: RowSelection | None, unused: Tensor) -> tuple[Tensor, int]:
    """Return the fields of a launch's `RowCount`; `unused` are any int32."""
    return (unused, 0) if selection is None else (selection.count, 1 + selection.may_skip)


def row_order(order: Tensor | None, unused: Tensor) -> tuple[Tensor, int]:
    """Return where a launch has its rows, and whether it reads that; `unused` are any int64."""
    return (unused, 0) if order is None else (order, 1)


def row_range(x: Tensor, first: int, last: int) -> Tensor:
    """Return rows [first, last) of x; of all rows no view is made, which takes CPU time."""
    return x if last - first == x.shape[0] else x[first:last]


def gather_rows(
    kernels: KernelSet,
    x: Tensor,
    selection: RowSelection,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return rows (M, D) of x (N, D), those of the selection, times `scale` (M,); else 0."""
    if out is None:
        out = x.new_empty(selection.order.shape[0], x.shape[1])
    own = selection.order, None if scale is None else scale.contiguous(), selection.count
    if scale is None:
        compiled(MoveRowsSpec(kernels.arch))(as_bits(out), as_bits(x), *own, Move.GATHER)
    else:
        compiled(MoveRowsSpec(kernels.arch, kernels.dtype))(out, x, *own, Move.GATHER)
    return out


def as_bits(x: Tensor) -> Tensor:
    """Return x (N, D) in the dtype of kernels that copy or clear rows, for any other one."""
    return x if x.dtype == torch.bfloat16 else x.view(torch.bfloat16)


def restore_rows(selection: RowSelection | None, x: Tensor) -> Tensor:
    """Return rows x (M, D) of dX in the order of all tokens, (N, D); 0 for those left out."""
    if selection is None:
        return x
    if selection.arch is None:
        return selection.restore(x, 0)
    out, own = torch.empty_like(x), (selection.order, None, selection.count)
    compiled(MoveRowsSpec(selection.arch))(as_bits(out), as_bits(x), *own, Move.SCATTER)
    return out


def select_rows(
    arch: str | None,
    y: Tensor,
    counted: Tensor,
    ignored: int,
    planned: tuple[int, bool],
    chunk: int,
) -> RowSelection | None:
    """Return the selection of the tokens that count, None if all are computed.

    Args:
        arch: architecture of the kernels that select; None if these do not.
        y: (N,) int64 targets.
        counted: (N,) int64, `ignored` where a token does not count.
        ignored: the index of targets that are ignored.
        planned: tokens of the plan, N or on a CPU those that count, and whether these are to come
            first where the host does not know their number yet.
        chunk: tokens of a chunk; those of the plan if it has no chunks.
    """
    tokens = len(y)
    if arch is not None:
        selection = select_on_device(arch, counted, ignored, chunk)
        return selection if counted is y else replace(selection, targets=selection.take(y))
    rows, sorts = planned
    if sorts and not (y.is_cuda and torch.cuda.is_current_stream_capturing()):
        order = (counted == ignored).to(torch.uint8).argsort(stable=True)
        found = CountedRows.of(counted != ignored)
        return RowSelection(order, y.index_select(0, order), None, chunk, tokens, counted=found)
    return None if rows == tokens else select_on_host(y, counted, ignored)


def with_aligned_rows(x: Tensor) -> Tensor:
    """Return x (N, D), or a copy of it if `has_aligned_rows` says that TMA cannot read it."""
    return x if has_aligned_rows(x) else x.clone(memory_format=torch.contiguous_format)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether rows of x (N, D) are contiguous and begin at multiples of 16 bytes, as TMA needs."""
    pitch, unit = x.stride()
    return unit == 1 and pitch >= x.shape[1] and pitch % 8 == 0 and x.data_ptr() % 16 == 0
