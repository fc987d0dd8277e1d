"""Outputs of the kernels of divergences: of random operands, whatever the case.

Rows of logits with all combinations of sides whose factors are written; and logits.
"""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.ops.divergence.inputs import DivergenceInputs, Side
from cutefce.ops.divergence.kernels import RowKernel, launch
from cutefce.ops.divergence.options import Divergence
from cutefce.ops.divergence.steps import STATS
from cutefce.ops.divergence.tiles import write_rows
from cutefce.ops.dtypes import sum_dtype
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

    Those of the kernels, if primitives are on kernels, or else of the steps in torch.
    The dtype of factors and of the logits' operands is that of the case.
    """
    like, arch = case.h, case.problem.arch or ""
    on_kernels = isinstance(primitives, CuteProjection)
    kernel = logits_kernel(arch_named(arch), case.problem.dtype) if on_kernels else None
    generator = torch.Generator().manual_seed(0)
    spread = SPREAD * torch.randn(2, ROWS, CLASSES, generator=generator)
    logits = [*spread.to(like.device, sum_dtype(like.dtype))]
    sides, scale = [Side(like, like, None, SCALE)] * 2, logits[0].new_full((), SCALE)
    call: Any = None  # which rows of logits do not ask for
    results: dict[str, CheckedOutput] = {}
    for form, *wanted, sums_given in product(DIVERGENCES, *((False, True),) * 3):
        trained = [wanted[0]] * 3 + [wanted[1]] * 3
        options = Divergence(form, BETA, "sum", -100, 0, 1.0, 1.0, None, None, trained)
        x = DivergenceInputs(sides, options, call, call, scale, None, None)
        stats = logits[0].new_empty(STATS, ROWS)
        outs = [[like.new_empty(ROWS, CLASSES)] if given else [] for given in wanted]
        if on_kernels:
            sums = [_sums_of(own) if sums_given and kernel else None for own in logits]
            RowKernel.on(arch, x).run(stats, logits, outs, sums)
        else:
            write_rows(x, stats, logits, outs, (0, ROWS))
        name = f" of the {form} of rows, {wanted}{' with sums' if sums_given else ''}"
        results[f"divergence{name}"] = CheckedOutput(options.values(stats), 1, FLOOR)
        for side, own in enumerate(outs):
            for factors in own:
                results[f"factors of side {side}{name}"] = CheckedOutput(factors, 1, FLOOR)
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
