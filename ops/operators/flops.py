"""FLOP formulas of the operators, for `torch.utils.flop_counter`.

A product of (N, D) and (D, V) counts 2·N·D·V.  Counted are the products that any method needs: one
in the forward and one for each gradient.  What a plan computes again is not counted, so that the
utilization of a model does not depend on its memory budget.  Sampled gradients count the entries
that tokens expect to keep at most.

This module is imported behind torch's counter, whose import takes longer than that of the package.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutefce.ops.interface.arguments import StepOptions
from cutefce.ops.operators.operators import STEP
from cutefce.ops.schema import unpack


def product(w_shape: Sequence[int], rows: Sequence[int]) -> int:
    """Return the FLOP of a product with a weight, of as many rows as `rows` has first."""
    return 2 * rows[0] * w_shape[0] * w_shape[1]


@register_flop_formula([torch.ops.cutefce.loss_forward, torch.ops.cutefce.loss_forward_into])
def _forward_flop(h_shape: Any, w_shape: Any, y_shape: Any, *_: Any, out_shape: Any = None) -> int:
    return product(w_shape, y_shape)


@register_flop_formula([torch.ops.cutefce.loss_backward, torch.ops.cutefce.loss_backward_into])
def _backward_flop(
    upstream_shape: Any,
    h_shape: Any,
    w_shape: Any,
    y_shape: Any,
    stats_shape: Any,
    *arguments: Any,
    out_shape: Any = None,
) -> int:
    """Return the FLOP of the wanted gradients' products.

    More than eight parameters: they are the operator's.
    """
    step: StepOptions
    step, options, *_ = unpack(arguments, *STEP)
    rows = min(options.samples, w_shape[0]) if options.is_sampled else w_shape[0]
    return (step.grad_hidden + step.grad_weight) * product((rows, w_shape[1]), y_shape)
