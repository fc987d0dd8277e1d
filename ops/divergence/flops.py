"""FLOP formulas of the operators of a divergence, by the rules of `ops.operators.flops`."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from cutefce.ops.divergence.options import OPERANDS, RECORDS, Divergence
from cutefce.ops.operators.flops import product
from cutefce.ops.schema import unpack


def _products(h_s: Any, w_s: Any, h_t: Any, w_t: Any, *_: Any) -> tuple[int, int]:
    """Return the FLOP of a product of each side, whose heads have these shapes."""
    return product(w_s, h_s), product(w_t, h_t)


@register_flop_formula(torch.ops.cutefce.divergence)
def _divergence_flop(*arguments: Any, out_shape: Any = None, **_: Any) -> int:
    return sum(_products(*arguments))


@register_flop_formula(torch.ops.cutefce.divergence_backward)
def _backward_flop(upstream: Any, stats: Any, *arguments: Any, out_shape: Any = None) -> int:
    options: Divergence = unpack(arguments[OPERANDS:], *RECORDS)[0]
    sides = enumerate(_products(*arguments))
    return sum(sum(options.gradients(i)[:2]) * flop for i, flop in sides)
