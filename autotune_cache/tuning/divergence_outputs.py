"""Outputs of the kernel of divergences: of random logits, whatever the tuning case.

With all combinations of sides whose factors are written.
"""

from itertools import product

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase
from cutefce.ops.divergence.options import DIVERGENCES, Divergence
from cutefce.ops.divergence.row_kernel import RowKernel
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.interface import AnyPrimitives

ROWS, CLASSES = 3, 120_008
"""So many classes that blocks hold some, and read the others again."""
BETA, SPREAD, SCALE = 0.25, 3.0, 2.0**10
FLOOR = 2.0**-14
"""Of relative errors of factors, which are about 2^-16 to 1 times `SCALE`."""


def divergence_outputs(case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
    """Return divergences, and factors in the dtype of the case's hidden states.

    Those of the kernel, if primitives are on kernels, or else of their definition, in float64.
    """
    like, arch = case.h, case.problem.arch
    if not isinstance(primitives.projection, CuteProjection):
        arch = None
    generator = torch.Generator().manual_seed(0)
    shape = 2, ROWS, CLASSES
    logits = list(SPREAD * torch.randn(shape, generator=generator).to(like.device))
    results: dict[str, CheckedOutput] = {}
    for form, *wanted in product(DIVERGENCES, (False, True), (False, True)):
        options = Divergence(
            form, BETA, "sum", -100, 0, 1.0, 1.0, None, None, [True] * 3, [True] * 3
        )
        if arch is None:
            values, factors = _defined(logits, options)
        else:
            outs = [like.new_empty(ROWS, CLASSES) if given else None for given in wanted]
            stats, scale = logits[0].new_empty(6, ROWS), logits[0].new_full((), SCALE)
            RowKernel(arch, options).run(stats, logits, outs, [scale, scale])
            values, factors = options.values(stats), outs
        name = f" of the {form} of rows, {wanted}"
        results[f"divergence{name}"] = CheckedOutput(values, 10)
        for side, is_wanted in enumerate(wanted):
            x = factors[side]
            if is_wanted and x is not None:
                results[f"factors of side {side}{name}"] = CheckedOutput(
                    x, 1, floor=FLOOR, relative_to_row=True
                )
    return results


def _defined(logits: list[Tensor], options: Divergence) -> tuple[Tensor, list[Tensor]]:
    """Return divergences (R,) and factors (R, V) by the definition."""
    with torch.enable_grad():
        wide = [x.double().requires_grad_() for x in logits]
        logs = [x.log_softmax(1) for x in wide]
        stats = wide[0].new_zeros(6, ROWS)
        others = [logs[1], logs[0]]
        if options.is_mixture:
            shares = [options.share(side) for side in (0, 1)]
            others = [sum(s * x.exp() for s, x in zip(shares, logs, strict=True)).log()] * 2
        rows = [(x.exp() * (x - y)).sum(1) for x, y in zip(logs, others, strict=True)]
        values = options.values(torch.stack([*stats[:4], *rows]))
        factors = torch.autograd.grad(values.sum(), wide)
    return values.detach(), [SCALE * x for x in factors]
