"""Checks of gradients to which a matrix of rank one is added, for all implementations."""

from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossOptions
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.kept_sums import Sums
from cutefce.ops.rows.targets import Targets
from tests.support.reference import random_case

SHAPES = [(1, 8, 11), (70, 8, 17), (521, 264, 1003), (257, 1096, 3001)]
"""Tokens, hidden and vocab, none of which fills its last tile."""


def check_dx(gradients: Any, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Check dX against float64, rounded and not: of every three rows the second has a factor alone.

    The third is ignored: it is 0, whatever its sums hold.
    """
    tokens, hidden, vocab = shape
    case = random_case(*shape, dtype=dtype, device=device, ignored=0)
    wide: Any = {"dtype": sum_dtype(dtype), "device": device}
    sums, row = torch.randn(tokens, hidden, **wide), 10 * torch.randn(hidden, **wide)
    scale, factor = torch.rand(tokens, **wide) + 1, torch.rand(tokens, **wide) + 1
    kind = torch.arange(tokens, device=device) % 3
    scale[kind > 0], factor[kind == 2], sums[kind == 2] = 0, 0, torch.nan
    targets, coefficients = Targets(case.y, vocab, LossOptions()), RowCoefficients(scale, -scale)
    first, second = scale[:, None].double() * sums.double(), factor[:, None].double() * row.double()
    third = -scale[:, None].double() * case.w[case.y].double()
    counts = kind < 2
    want, size = first + second + third, first.abs() + second.abs() + third.abs()
    rounded, unrounded = (torch.full_like(x, torch.nan) for x in (case.h, sums))
    for out in (rounded, unrounded, sums):
        matrix = RankOne(factor, row)
        gradients.finish_dx(out, Sums(sums), case.w, targets, coefficients, matrix)
        assert not out[~counts].any()
        assert_rounded_once(out[counts], want[counts], size[counts], additions=3)


def check_dw(gradients: Any, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Check dW against float64, finished and as sums: all rows, and the last ones alone."""
    tokens, hidden, vocab = shape
    case = random_case(*shape, dtype=dtype, device=device)
    wide: Any = {"dtype": sum_dtype(dtype), "device": device}
    targets = Targets(case.y, vocab, LossOptions())
    coefficient, grad_scale = torch.randn(tokens, **wide), torch.tensor(0.37, **wide)
    coefficient[~targets.active] = 0
    target_grad = gradients.target_grad(case.h, coefficient, targets)
    exps = torch.rand(tokens, round_up(vocab, 8), device=device).to(dtype)[:, :vocab]
    factors = torch.full((vocab + 2,), torch.nan, **wide)  # at no multiple of 16 bytes
    factors[1:-1] = torch.randn(vocab, **wide)
    matrix = RankOne(factors[1:-1], 10 * torch.randn(hidden, **wide))

    h, e = case.h.double(), exps.double()
    at_target = torch.zeros_like(e)
    at_target[torch.arange(tokens, device=device), targets.safe_index] = coefficient.double()
    outer = matrix.factor[:, None].double() * matrix.row.double()
    want = (e + at_target).t() @ h + outer
    size = (e + at_target.abs()).t() @ h.abs() + outer.abs()
    additions = 4 + tokens // 8
    for rows in (slice(0, vocab), slice(8, vocab)):
        out = torch.full_like(case.w[rows], torch.nan)
        operands = exps[:, rows], case.h, target_grad, rows.start
        more = {"rank_one": matrix.rows(rows)}
        gradients.add_weight(Sums(out), *operands, grad_scale=grad_scale, **more)
        scale = grad_scale.double()
        assert_rounded_once(out, want[rows] * scale, size[rows] * scale, additions)
        sums = torch.full(out.shape, torch.nan, **wide)
        gradients.add_weight(Sums(sums), *operands, **more)
        assert_rounded_once(sums, want[rows], size[rows], additions)


def assert_rounded_once(got: Tensor, want: Tensor, size: Tensor, additions: int) -> None:
    """Compare with float64: one rounding of `got`, and a number of additions of sums.

    `size` are the sums of the absolute terms.
    """
    result, sums = torch.finfo(got.dtype), torch.finfo(sum_dtype(got.dtype))
    bound = result.eps / 2 * want.abs() + additions * sums.eps * size
    bound += result.smallest_normal * result.eps  # results in the subnormal range
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
