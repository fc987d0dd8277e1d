"""Outputs of the kernels of divergences: of random operands, whatever the case.

Rows of logits with all combinations of sides whose factors are written; and logits.
"""

import math
from itertools import product

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.ops.divergence.kernels import RowKernel, launch
from cutefce.ops.divergence.options import Divergence
from cutefce.ops.divergence.steps import STATS
from cutefce.ops.interface.arguments import DIVERGENCES
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.primitives import Primitives

ROWS, CLASSES = 3, 120_008
"""So many classes that blocks hold some, and read the others again."""
BETA, SPREAD = 0.25, 3.0
SCALE = 2.0**10
"""Of factors, which are about 2^-16 to 1."""
LOGITS, CLUSTERS = (300, 200, 1000), 4
"""Tokens, hidden and classes, which fill no tile, and clusters, which have several tiles each."""
FLOOR = torch.finfo(torch.float16).smallest_normal
"""Of relative errors of factors that were rounded to 16 bits."""


def divergence_outputs(case: Case, primitives: Primitives) -> dict[str, CheckedOutput]:
    """Return divergences (R,), their factors (R, V), logits (N, V) and log-sum-exps, by name.

    Those of the kernels, if primitives are on kernels, or else of their definitions, in float64.
    The dtype of factors and of the logits' operands is that of the case.
    """
    like, arch = case.h, case.problem.arch or ""
    on_kernels = isinstance(primitives, CuteProjection)
    kernel = logits_kernel(arch_named(arch), case.problem.dtype) if on_kernels else None
    generator = torch.Generator().manual_seed(0)
    logits = list(SPREAD * torch.randn(2, ROWS, CLASSES, generator=generator).to(like.device))
    results: dict[str, CheckedOutput] = {}
    for form, *wanted, sums_given in product(DIVERGENCES, *((False, True),) * 3):
        trained = [wanted[0]] * 3 + [wanted[1]] * 3
        options = Divergence(form, BETA, "sum", -100, 0, 1.0, 1.0, None, None, trained)
        factors = [like.new_empty(ROWS, CLASSES) if given else None for given in wanted]
        if on_kernels:
            stats, scale = logits[0].new_empty(STATS, ROWS), logits[0].new_full((), SCALE)
            sums = [_sums_of(x) if sums_given and kernel else None for x in logits]
            outs = [[] if x is None else [x] for x in factors]
            RowKernel.with_scales(arch, options, [(scale, scale)] * 2).run(
                stats, logits, outs, sums
            )
            values = options.values(stats)
        else:
            values = _write_defined(logits, options, factors)
        name = f" of the {form} of rows, {wanted}{' with sums' if sums_given else ''}"
        results[f"divergence{name}"] = CheckedOutput(values, 1, FLOOR)
        for side, x in enumerate(factors):
            if x is not None:
                results[f"factors of side {side}{name}"] = CheckedOutput(x, 1, FLOOR)
    tokens, hidden, vocab = LOGITS
    h, w = (
        (torch.randint(-64, 65, (rows, hidden), generator=generator) / 16).to(like)
        for rows in (tokens, vocab)
    )
    if kernel is None:
        out = (h.double() @ w.double().t()).float()
        parts = _sums_of(out)
    else:
        out = like.new_empty(tokens, vocab, dtype=torch.float32)
        parts = launch(kernel, CLUSTERS, out, h, w)
    lses = ((parts[0] * math.log(2)).double() + parts[1].double().log()).logsumexp(1).float()
    results["logits in float32"] = CheckedOutput(out, 1, floor=1.0)
    return results | {"log-sum-exps of logits": CheckedOutput(lses, 1, floor=1.0)}


def _sums_of(logits: Tensor) -> Tensor:
    """Return what `cutefce.ops.divergence.kernels.launch` returns, of logits (R, V) in one part."""
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
        rows.append((logs[0].exp() - logs[1].exp()).abs().sum(1) / 2)
        values = options.values(torch.stack(rows))
        gradients = torch.autograd.grad(values.sum(), wide)
    for out, gradient in zip(factors, gradients, strict=True):
        if out is not None:
            out.copy_(gradient * SCALE)
    return values.detach()
