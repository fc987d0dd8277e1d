"""Gradients of a tuning case over windows: of sums of dX in few bits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.planning.chunks.sizes import Chunks
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.row_selection import select_on_device
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets
from cutefce.ops.strategies import windows
from cutefce.ops.strategies.gradients_in_forward import gradients_in_forward
from cutefce.ops.strategies.hidden_sums import HiddenSums
from cutefce.ops.strategies.loss_inputs import LossInputs
from cutefce.ops.strategies.weight_sums import WeightSums

Inputs = LossInputs[Any, Any]


def hidden_of_windows_in_chunks(inputs: Inputs, arch: str | None, block: int) -> Tensor:
    """Return dX alone, computed in the forward of two chunks of tokens, in about three windows.

    These are whole blocks of `block` columns.
    """
    h, vocab, chunk = inputs.h, len(inputs.w), ceil_div(inputs.tokens, 2)
    inputs, selection = _selecting(inputs, arch, chunk)
    loss_scale = inputs.targets.loss_scale(sum_dtype(h.dtype))
    dx = HiddenSums.empty(torch.empty_like(h), loss_scale.dtype)
    dw = WeightSums.empty(inputs.w[:0], loss_scale.dtype, LOW_BITS[0])
    window = round_up(ceil_div(vocab, 4), block)
    columns = window, 2 * window  # the last window is wider
    chunks = Chunks.even(inputs.tokens, chunk)
    stats = gradients_in_forward(inputs, loss_scale, *columns, chunks, dx, dw, None)
    return dx.finish(inputs, stats, loss_scale, selection)


def of_windows(
    inputs: Inputs, arch: str | None, block: int
) -> Iterator[tuple[str, Tensor | None, Tensor]]:
    """Yield a name, dX and dW of the summed losses, of windows over which sums of dX are kept.

    A third of the columns, in whole blocks, is stored; the others are computed again, as
    probabilities.
    """
    h, w, vocab = inputs.h, inputs.w, len(inputs.w)
    inputs, _ = _selecting(inputs, arch, inputs.tokens)
    window = round_up(ceil_div(vocab, 3), block)
    stored = [(0, h.new_empty(len(h), window))]
    _, stats = windows.forward(inputs, stored)
    one = stats.rows.new_ones(())
    for bits in LOW_BITS:
        dw, kept = torch.empty_like(w), bits if h.dtype == torch.bfloat16 else None
        step = stats, stored, one, window, True, dw
        dx = windows.backward(inputs, *step, hidden_bits=kept)
        yield f" of windows, with {16 + bits} bits of dX's sums", dx, dw


def _selecting(inputs: Inputs, arch: str | None, chunk: int) -> tuple[Inputs, RowSelection | None]:
    """Return operands of which kernels select the rows that count, in chunks of tokens."""
    targets = inputs.targets
    if not isinstance(inputs.primitives.projection, CuteProjection):
        return inputs, None
    ignored = targets.options.ignore_index
    selection = select_on_device(arch or "", targets.index, ignored, chunk)
    targets = Targets(selection.targets, len(inputs.w), targets.options)
    targets.selection = selection
    return replace(inputs, targets=targets), selection
