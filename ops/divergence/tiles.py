"""Steps of tiles of logits: statistics of tokens, and factors.

The statistics of a token are a number near the largest logit of the student, its log-sum-exp less
that, the same of the teacher, KL(student || x) and KL(teacher || x), where x is the other side or
the JSD's mixture, and total variation; a KL that is not needed is 0.  With total variation as the
divergence, the sums of `elementwise.add_variation_` take the place of the KLs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cutefce.ops.divergence.elementwise import (
    add_exps_,
    add_kl_,
    add_variation_,
    factors_,
)
from cutefce.ops.divergence.inputs import Call, DivergenceInputs, matrix
from cutefce.ops.divergence.kernels import write_logits
from cutefce.ops.divergence.options import STUDENT, TEACHER
from cutefce.ops.divergence.steps import SUMS, side_of
from cutefce.ops.primitives.elementwise import joined
from cutefce.ops.primitives.portable_gradients import apply_rowwise
from cutefce.ops.program.steps import Range, Step


def _logits(call: Call, s: Step) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the logits (R, C) of both sides, and what a kernel sums of them."""
    tokens, columns, logits, sums = slice(*s.rows), slice(*s.columns), [], []
    shape = s.rows[1] - s.rows[0], s.columns[1] - s.columns[0]
    for side, name in zip(call.inputs.sides, s.writes, strict=False):
        logits.append(matrix(call, name, *shape))
        transform = None if side.logits is None else side.logits.part(tokens, columns)
        sums.append(write_logits(logits[-1], side.h[tokens], side.w[columns], transform))
    return logits, sums


def rows(call: Call, s: Step) -> None:
    """Make statistics of tokens from logits of all classes, and the factors that are kept."""
    x, stats = call.inputs, call.values["stats"][:, slice(*s.rows)]
    logits, sums = _logits(call, s)
    # of either side, windows of classes, with the kept tokens of one memory
    names = [[n for n in s.writes[3:] if side_of(n) == index] for index in (STUDENT, TEACHER)]
    first, aliased = s.rows[0], x.plan.layout.aliased
    first -= aliased if first >= aliased else 0
    kernel = call.values["row kernel"]
    if kernel is not None:
        outs = [[matrix(call, name) for name in own[:2]] for own in names]
        kernel.run(stats, logits, outs, sums, first)
        return
    last = first + stats.shape[1]
    outs = [[matrix(call, name)[first:last] for name in own] for own in names]
    write_rows(x, stats, logits, outs, s.rows)


def write_rows(
    x: DivergenceInputs,
    stats: Tensor,
    logits: Sequence[Tensor],
    outs: Sequence[Sequence[Tensor]],
    tokens: Range,
) -> None:
    """Write the statistics (7, R) of logits (R, V) of both sides, and their factors to `outs`.

    Those of a side are matrices (R, C) of the classes, one after the other, or none.
    """
    _clear(stats)
    _add_exps(stats, logits)
    stats[1:SUMS:2].log_()
    _add_terms(x, stats, logits)
    for index, own in enumerate(outs):
        begin = 0
        for out in own:
            tile = [side[:, begin : begin + out.shape[1]] for side in logits]
            _write_factors(x, out, index, tile, stats, tokens)
            begin += out.shape[1]


def add_exps(call: Call, s: Step) -> None:
    """Add the exponentials of some classes to those of the log-sum-exps of tokens."""
    stats = call.values["stats"][:, slice(*s.rows)]
    if s.columns[0] == 0:
        _clear(stats)
    _add_exps(stats, _logits(call, s)[0])


def finish_lses(call: Call, s: Step) -> None:
    """Set the log-sum-exps from the sums of this rank's classes."""
    stats, shard = call.values["stats"], call.inputs.shard
    if shard.group:
        parts = shard.all_gather(stats[:SUMS])
        for top in (0, 2):
            stats[top + 1], stats[top] = joined(parts[:, top + 1], parts[:, top], 0)
    stats[1:SUMS:2].log_()


def add_terms(call: Call, s: Step) -> None:
    """Add the terms of some classes to the divergences of tokens."""
    stats = call.values["stats"][:, slice(*s.rows)]
    _add_terms(call.inputs, stats, _logits(call, s)[0])


def all_reduce(call: Call, s: Step) -> None:
    """Add the divergences of all ranks' classes."""
    stats, shard = call.values["stats"], call.inputs.shard
    stats[SUMS:] = shard.all_reduce_(stats[SUMS:].clone())


def copy(call: Call, s: Step) -> None:
    """Write the factors of kept tokens of a window to the first rows of its memory."""
    columns = slice(*s.columns)
    for name in s.writes:
        out, at = window(call, name, s.columns), 0
        for part in (part for part in s.reads if side_of(part) == side_of(name)):
            every = matrix(call, part)
            out[at : at + len(every)] = every[:, columns] if part.endswith("kept") else every
            at += len(every)


def factors(call: Call, s: Step) -> None:
    """Write the factors of tokens that were not kept, of the sides that are trained."""
    x, stats = call.inputs, call.values["stats"][:, slice(*s.rows)]
    logits, _ = _logits(call, s)
    for name in s.writes[2:]:
        out = window(call, name, s.columns)[slice(*s.rows)]
        _write_factors(x, out, side_of(name), logits, stats, s.rows)


def window(call: Call, name: str, columns: Range) -> Tensor:
    """Return the factors (M, C) of all tokens of a window of `columns`."""
    if name.endswith("kept"):
        return matrix(call, name)[:, slice(*columns)]
    return matrix(call, name, len(call.inputs.h), columns[1] - columns[0])


def _clear(stats: Tensor) -> None:
    """Let statistics be those of no class."""
    stats.zero_()
    stats[0:SUMS:2] = -torch.inf


def _lses(stats: Tensor, first: int) -> Tensor:
    """Return (R, 4) the log-sum-exps of both sides, those of `first` before the others."""
    return stats[:SUMS].roll(2 * first, 0).t()


def _add_exps(stats: Tensor, logits: Sequence[Tensor]) -> None:
    for index, x in enumerate(logits):
        apply_rowwise(add_exps_, stats[2 * index], stats[2 * index + 1], x)


def _add_terms(x: DivergenceInputs, stats: Tensor, logits: Sequence[Tensor]) -> None:
    of_student, of_teacher, variation = stats[SUMS:]
    if x.options.divergence == "tv":
        sums = of_student, of_teacher, variation
        apply_rowwise(add_variation_, *sums, *logits, _lses(stats, STUDENT))
        return
    for a, out in ((STUDENT, of_student), (TEACHER, of_teacher)):
        if x.options.first in (a, None):
            once = None if x.options.is_mixture and a == TEACHER else variation
            operands = logits[a], logits[1 - a], _lses(stats, a)
            apply_rowwise(add_kl_, out, once, *operands, whole=x.shares[a])


def _write_factors(
    x: DivergenceInputs,
    out: Tensor,
    a: int,
    logits: Sequence[Tensor],
    stats: Tensor,
    tokens: Range,
) -> None:
    """Write the factors (R, C) of the side `a` to `out`, of the R `tokens`."""
    first, cap, (_, scale) = x.options.first, x.sides[a].cap, x.scales[a]
    scale = scale[slice(*tokens)] if scale.ndim else scale.expand(len(out))
    cap = None if cap is None else cap[slice(*tokens)]
    kl = stats[SUMS + a] if first in (a, None) else None
    operands = logits[a], logits[1 - a], _lses(stats, a), kl, cap, scale
    apply_rowwise(factors_, out, *operands, whole=x.shares[a])
