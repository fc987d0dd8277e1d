"""Outputs of the kernel of divergences: of random logits, whatever the tuning case.

With all combinations of sides whose factors are written.
"""

from itertools import product

import torch
from torch import Tensor

from cutefce.ops.divergence.factors import FactorRows
from cutefce.ops.divergence.options import DIVERGENCES, Divergence
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives

ROWS, CLASSES = 3, 120_008
"""So many classes that blocks hold some, and read the others again."""
BETA, SPREAD = 0.25, 3.0
SCALE = 2.0**10
"""Of factors, which are about 2^-16 to 1."""


def divergence_outputs(
    primitives: AnyPrimitives, like: Tensor, arch: str | None
) -> dict[str, Tensor]:
    """Return divergences (R,), and factors (R, V) in the dtype of `like`, by name.

    Those of the kernel for `arch`, if primitives are on kernels, or else of their definition, in
    float64.
    """
    if not isinstance(primitives.projection, CuteProjection):
        arch = None
    generator = torch.Generator().manual_seed(0)
    shape = 2, ROWS, CLASSES
    logits = list(SPREAD * torch.randn(shape, generator=generator).to(like.device))
    results: dict[str, Tensor] = {}
    for form, *wanted in product(DIVERGENCES, (False, True), (False, True)):
        options = Divergence(
            form, BETA, "sum", -100, 0, 1.0, 1.0, None, None, [True] * 3, [True] * 3
        )
        factors = [like.new_empty(ROWS, CLASSES) if given else None for given in wanted]
        if arch is None:
            values = _write_defined(logits, options, factors)
        else:
            stats, scale = logits[0].new_empty(6, ROWS), logits[0].new_full((), SCALE)
            outs = [None if x is None else FactorRows.of(x) for x in factors]
            RowKernel(arch, options).run(stats, logits, outs, [scale, scale])
            values = options.values(stats)
        name = f" of the {form} of rows, {wanted}"
        results[f"divergence{name}"] = values
        for side, x in enumerate(factors):
            if x is not None:
                results[f"factors of side {side}{name}"] = x
    return results


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
