"""Outputs of the kernels of divergences: of random operands, whatever the tuning case.

Rows of logits with all combinations of sides whose factors are written; and logits.
"""

from itertools import product

import torch
from torch import Tensor

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.ops.divergence.factors import FactorRows
from cutefce.ops.divergence.logits import launch
from cutefce.ops.divergence.options import DIVERGENCES, Divergence
from cutefce.ops.divergence.row_kernel import RowKernel
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
            RowKernel.with_scales(arch, options, [scale, scale], scale).run(stats, logits, outs)
            values = options.values(stats)
        name = f" of the {form} of rows, {wanted}"
        results[f"divergence{name}"] = values
        for side, x in enumerate(factors):
            if x is not None:
                results[f"factors of side {side}{name}"] = x
    return results


def logits_output(primitives: AnyPrimitives, like: Tensor, arch: str | None) -> Tensor:
    """Return logits in float32 of operands in the dtype of `like`, as `divergence_outputs` does.

    The operands are the same in any dtype.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, vocab = LOGITS
    h, w = (
        (torch.randint(-64, 65, (rows, hidden), generator=generator) / 16).to(like)
        for rows in (tokens, vocab)
    )
    kernel = None
    if arch is not None and isinstance(primitives.projection, CuteProjection):
        kernel = logits_kernel(arch_named(arch), str(like.dtype).removeprefix("torch."))
    if kernel is None:
        return (h.double() @ w.double().t()).float()
    out = like.new_empty(tokens, vocab, dtype=torch.float32)
    launch(kernel, CLUSTERS, out, h, w)
    return out


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
