"""FLOP formulas of the operators of a divergence, by the rules of `ops.operators.flops`."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutefce.ops.divergence.operators import OPERANDS
from cutefce.ops.divergence.options import RECORDS, Divergence
from cutefce.ops.schema import unpack


def _products(shapes: Any) -> tuple[int, int]:
    """Return the FLOP of a product of each side, whose heads have these shapes."""
    student, classes, teacher, _ = shapes
    work = 2 * student[0] * classes[0]
    return work * student[1], work * teacher[1]


@register_flop_formula(torch.ops.cutefce.divergence)
def _divergence_flop(*arguments: Any, out_shape: Any = None, **_: Any) -> int:
    return sum(_products(arguments[:4]))


@register_flop_formula(torch.ops.cutefce.divergence_backward)
def _backward_flop(upstream: Any, stats: Any, *arguments: Any, out_shape: Any = None) -> int:
    options: Divergence = unpack(arguments[OPERANDS:], *RECORDS)[1]
    sides = enumerate(_products(arguments[:4]))
    return sum(sum(options.gradients(i)[:2]) * product for i, product in sides)
