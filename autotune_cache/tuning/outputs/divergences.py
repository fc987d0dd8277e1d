"""Outputs of the kernels of divergences: of random operands, whatever the tuning case.

Rows of logits with all combinations of sides whose factors are written; and logits.
"""

import math
from itertools import product

import torch
from torch import Tensor

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec import ProjectExpSpec
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.ops.divergence.factors import FactorRows
from cutefce.ops.divergence.logits import launch
from cutefce.ops.divergence.options import DIVERGENCES, Divergence
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives

ROWS, CLASSES = 3, 120_008
"""So many classes that blocks hold some, and read the others again."""
BETA, SPREAD = 0.25, 3.0
SCALE = 2.0**10
"""Of factors, which are about 2^-16 to 1."""
LOGITS, CLUSTERS = (300, 200, 1000), 4
"""Tokens, hidden and classes, which fill no tile, and clusters, which have several tiles each."""


def divergence_outputs(
    primitives: AnyPrimitives, like: Tensor, arch: str | None
) -> dict[str, Tensor]:
    """Return divergences (R,), and factors (R, V) in the dtype of `like`, by name.

    Those of the kernel for `arch`, if primitives are on kernels, or else of their definition, in
    float64.
    """
    has_sums = _logits_kernel(arch, like) is not None
    if not isinstance(primitives.projection, CuteProjection):
        arch = None
    generator = torch.Generator().manual_seed(0)
    shape = 2, ROWS, CLASSES
    logits = list(SPREAD * torch.randn(shape, generator=generator).to(like.device))
    results: dict[str, Tensor] = {}
    for form, *wanted, sums_given in product(DIVERGENCES, *((False, True),) * 3):
        options = Divergence(
            form, BETA, "sum", -100, 0, 1.0, 1.0, None, None, [True] * 3, [True] * 3
        )
        factors = [like.new_empty(ROWS, CLASSES) if given else None for given in wanted]
        if arch is None:
            values = _write_defined(logits, options, factors)
        else:
            stats, scale = logits[0].new_empty(6, ROWS), logits[0].new_full((), SCALE)
            outs = [None if x is None else FactorRows.of(x) for x in factors]
            sums = [_sums_of(x) if sums_given and has_sums else None for x in logits]
            kernel = RowKernel.with_scales(arch, options, [scale, scale], scale)
            kernel.run(stats, logits, outs, sums)
            values = options.values(stats)
        name = f" of the {form} of rows, {wanted}{' with sums' if sums_given else ''}"
        results[f"divergence{name}"] = values
        for side, x in enumerate(factors):
            if x is not None:
                results[f"factors of side {side}{name}"] = x
    return results


def logits_outputs(primitives: AnyPrimitives, like: Tensor, arch: str | None) -> dict[str, Tensor]:
    """Return logits in float32 of operands in the dtype of `like`, and their log-sum-exps, by name.

    As for `divergence_outputs`.  The operands are the same in any dtype.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocab = LOGITS
    h, w = (
        (torch.randint(-64, 65, (rows, hidden), generator=generator) / 16).to(like)
        for rows in (tokens, vocab)
    )
    kernel = _logits_kernel(arch, like)
    if kernel is None or not isinstance(primitives.projection, CuteProjection):
        out = (h.double() @ w.double().t()).float()
        sums = _sums_of(out)
    else:
        out = like.new_empty(tokens, vocab, dtype=torch.float32)
        sums = launch(kernel, CLUSTERS, out, h, w)
    lses = ((sums[0] * math.log(2)).double() + sums[1].double().log()).logsumexp(1)
    return {"logits in float32": out, "log-sum-exps of logits": lses.float()}


def _logits_kernel(arch: str | None, like: Tensor) -> ProjectExpSpec | None:
    """Return the kernel of logits of operands in the dtype of `like`, if `arch` has one."""
    dtype = dtype_name(like.dtype)
    return None if arch is None else logits_kernel(arch_named(arch), dtype)


def _sums_of(logits: Tensor) -> Tensor:
    """Return what `cutefce.ops.divergence.logits.launch` returns, of logits (R, V) in one part."""
    in_bits = logits.double() / math.log(2)
    top = in_bits.amax(1, keepdim=True).float()
    return torch.stack([top, (in_bits - top).exp2().sum(1, keepdim=True).float()])


def _write_defined(
    logits: list[Tensor], options: Divergence, factors: list[Tensor | None]
) -> Tensor:
    """Return divergences (R,), and write factors (R, V), by the definition in float64."""
    with torch.enable_grad():
        wide = [x.double().requires_grad_() for x in logits]
        logs = [x.log_softmax(1) for x in wide]
        others = logs[::-1]
        if options.is_mixture:
            student, teacher = (options.share(side) * logs[side].exp() for side in (0, 1))
            others = [(student + teacher).log()] * 2
        rows = [(x.exp() * (x - y)).sum(1) for x, y in zip(logs, others, strict=True)]
        values = options.values(torch.stack(rows))
        gradients = torch.autograd.grad(values.sum(), wide)
    for out, gradient in zip(factors, gradients, strict=True):
        if out is not None:
            out.copy_(gradient * SCALE)
    return values.detach()
